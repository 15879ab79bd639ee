"""Workloads: prompts, lengths and the times at which they are sent."""
