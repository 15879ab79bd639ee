"""Triton implementations of the kernels for CUDA devices, one operation per file. Imported only on a CUDA machine.

The order in which a row is summed depends on that row alone, never on the other rows of the batch: attention splits a
sequence by that sequence's length, norms reduce one row per program, and sampling adds integers.
"""
