"""Weights that are not all on the device: where they are stored, how they are fetched, how the model accesses them."""
