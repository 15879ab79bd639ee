"""Collective operations of ranks on CUDA devices, through each other's memory."""
