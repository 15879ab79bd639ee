"""Copies between device and host memory."""
