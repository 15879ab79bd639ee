"""Requests: callers' input, checked and brought to one form, and the state of a request in the engine."""
