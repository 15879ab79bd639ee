"""`spill bench`."""
