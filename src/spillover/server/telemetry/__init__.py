"""Metrics, the page that shows them, and logs."""
