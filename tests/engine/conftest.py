"""A remote store for the tests of this folder that need one."""

from support.valkey import valkey, valkey_program  # noqa: F401
