"""The server used by the tests of the remote tier."""

from support.valkey import valkey, valkey_program  # noqa: F401
