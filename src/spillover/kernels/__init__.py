"""One operation a file: a plain torch reference beside its native kernel. Knows no other room. A model calls what
layer_kernels chooses for its device.

Native kernels are batch invariant: a row of the output has the same bits whatever else is in the batch and however the
prompt was cut into chunks, because every sum has one fixed order.
"""
