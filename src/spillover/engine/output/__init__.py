"""Conversion of tokens to the outputs that callers get."""
