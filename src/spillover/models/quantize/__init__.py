"""Quantising a checkpoint: the target schemes, a view of a checkpoint as quantised, and calibration on text."""
