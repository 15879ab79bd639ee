"""Mixtures of experts, whether all of them are on the device or not."""
