"""Model inputs: configurations, checkpoints and files of every format, with reference results."""
