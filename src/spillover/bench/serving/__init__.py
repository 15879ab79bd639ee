"""Load on a server, and the metrics measured under it."""
