"""Traces of steps."""
