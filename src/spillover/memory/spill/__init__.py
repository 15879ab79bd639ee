"""KV below the device: host memory, spills and restores."""
