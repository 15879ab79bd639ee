"""What is loaded: configurations, checkpoints and files of every format, and what they compute by definition."""
