"""Runs steps on a CUDA device."""
