"""The runner for the CPU."""
