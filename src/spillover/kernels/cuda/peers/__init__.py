"""Ranks on CUDA devices meet in each other's memory."""
