"""`spill plan` and `spill doctor`."""
