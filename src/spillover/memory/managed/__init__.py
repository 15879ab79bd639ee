"""Managed memory (CUDA's unified memory): pages that migrate to the processor that touches them, within a budget."""
