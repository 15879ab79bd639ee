"""Experiments without engines: pretended runs and made-up results."""
