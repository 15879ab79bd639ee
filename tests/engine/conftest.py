"""A remote store for the tests of this folder that want one."""

from valkey import valkey, valkey_program  # noqa: F401
