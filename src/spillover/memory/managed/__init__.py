"""Managed memory (CUDA's unified memory): pages that move to whoever touches them, and the budget they are kept to."""
