"""Commands that make several servers one."""
