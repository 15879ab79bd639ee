"""One host memory for all engines of a machine: the process that owns it, and how engines use it.

`index` keeps the owner's books, `owner` is the process, `wire` what the two sides say to each other, `client` an
engine's end of it, and `tier` the KV tier that is made of that.
"""
