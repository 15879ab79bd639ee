"""The same operations on a CUDA device, one a file, in Triton. Imported only where there is such a device.

A row's sums have one order that depends on the row alone, never on the rows beside it: attention splits a sequence by
its own length, norms reduce one row a program, and draws add integers.
"""
