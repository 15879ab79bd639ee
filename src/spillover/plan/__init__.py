"""Planning: the machine's memory, a model's needs, the split of the one over the other, and the speed limits.

Works with shapes, bytes and rates only; loads no weights and runs no model.
"""
