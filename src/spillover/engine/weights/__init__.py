"""Weights that are not all on the device: where they live, how they come, and what the model gets to see of them."""
