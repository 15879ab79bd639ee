"""Parts that the runners of all devices share: request table, step arrays, sampling, results."""
