"""Finding and fetching models."""
