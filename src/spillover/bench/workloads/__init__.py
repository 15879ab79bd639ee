"""Workloads: prompts, lengths and times to send."""
