"""Requests: what callers pass, checked and brought to one form, and the state of one on its way through the engine."""
