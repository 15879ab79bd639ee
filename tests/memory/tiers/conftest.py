"""The server that the tests of the remote tier share."""

from support.valkey import valkey, valkey_program  # noqa: F401
