"""`spill lab`."""
