"""`spill demo`."""
