"""Tensors of an arena are disjoint and aligned, and their memory is freed with the last of them."""

from __future__ import annotations

import gc

import psutil
import torch

from spillover.kernels.arena import CHUNK, Arena


def test_tensors_do_not_overlap_and_are_aligned() -> None:
    arena = Arena()
    shapes = [(3, 5), (1,), (700, 1000), (17, 3, 2), (5000, 4000), (2, 2)]
    tensors = [arena.empty(*shape).fill_(index) for index, shape in enumerate(shapes)]
    for index, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape
        assert tensor.data_ptr() % 64 == 0
        assert torch.equal(tensor, torch.full(shape, float(index)))


def test_a_chunk_goes_back_with_its_last_tensor() -> None:
    process = psutil.Process()
    arena = Arena()
    held = [arena.empty(CHUNK // 4).fill_(1) for _ in range(8)]
    full = process.memory_info().rss
    del held[:7]
    gc.collect()
    assert full - process.memory_info().rss > 5 * CHUNK
    assert float(held[0].sum()) == CHUNK // 4
