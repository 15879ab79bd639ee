"""Structured output: grammars, which are first tried out in separate processes."""
