"""Ranks: processes that each hold a part of a model and compute every step together. See docs/parallel.md."""
