"""`spill chat`."""
