"""Triton's kernels are loaded in a way that leaves space for kernels that start early."""

from __future__ import annotations

import pytest
import torch
from triton import knobs

from spillover.kernels.triton import launch


def test_a_kernel_asks_for_shared_memory_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(launch, "prefer_shared_memory", asked.append)
    monkeypatch.setattr(torch.version, "hip", None)
    knobs.runtime.kernel_load_end_hook(None, 7, "kernel", (), "hash")
    assert asked == [7]
