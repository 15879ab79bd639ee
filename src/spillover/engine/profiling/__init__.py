"""Profiles and traces of steps."""
