"""KV below the device: host memory, what goes there and what comes back."""
