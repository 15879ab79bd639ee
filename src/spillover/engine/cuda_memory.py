"""How torch takes memory of a CUDA device, which a budget has to hold for."""

from __future__ import annotations

import os

import torch

SETTING = "expandable_segments:True"


def take_as_needed() -> None:
    """From now on memory grows in runs whose freed parts serve any size, so that what is taken from the device is
    little more than what is in use: steps of many sizes would otherwise leave holes that add up to gigabytes. Who has
    told torch otherwise is left alone."""
    if os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"):
        return
    torch._C._accelerator_setAllocatorSettings(SETTING)
