"""Quantising a checkpoint: what is made of it, the checkpoint seen so, and calibration on text."""
