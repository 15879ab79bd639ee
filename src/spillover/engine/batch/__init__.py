"""What the runners of all devices share: requests, a step's arrays, sampling, results."""
