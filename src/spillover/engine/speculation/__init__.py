"""Speculation: tokens are guessed, verified beside everybody else's rows, and kept where the model samples the same."""
