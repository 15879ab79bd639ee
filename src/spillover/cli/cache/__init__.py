"""`spill cache`."""
