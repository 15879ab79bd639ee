"""Drafters: what proposes tokens, their interface, and the mapping from a draft model's vocabulary."""
