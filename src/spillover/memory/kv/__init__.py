"""The KV cache on the device: blocks, block tables and the prefix tree."""
