"""Metrics, the page that shows them, traces, and logs."""
