"""The KV cache on the device: blocks, tables and the prefix tree."""
