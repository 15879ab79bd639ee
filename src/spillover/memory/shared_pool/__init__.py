"""One pool of host memory for all engines of a machine: the process that owns it, and its use by engines.

`index` is the owner's bookkeeping, `owner` the process, `wire` the protocol between both sides, `client` the engine's
side, and `tier` the KV tier based on it.
"""
