"""Structured output: grammars, tried out in processes of their own."""
