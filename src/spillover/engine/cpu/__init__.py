"""Runs steps on the CPU."""
