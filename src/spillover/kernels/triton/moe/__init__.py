"""Mixtures of experts on a CUDA device."""
