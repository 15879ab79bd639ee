"""Finding and downloading models."""
