"""A remote store for the tests of this folder that want one."""

from support.valkey import valkey, valkey_program  # noqa: F401
