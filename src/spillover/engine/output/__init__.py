"""From tokens to what a caller gets."""
