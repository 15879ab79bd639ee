"""Experiments without engines: simulated runs and made-up results."""
