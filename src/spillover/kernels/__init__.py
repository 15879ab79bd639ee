"""Kernels, one operation per file: a plain torch reference next to its native kernel. Depends on no other room
(top-level package). A model calls the kernels that layer_kernels chooses for its device.

Native kernels are batch-invariant: a row of the output has the same bits whatever the other rows of the batch and
however the prompt was cut into chunks, because every sum has one fixed order.
"""
