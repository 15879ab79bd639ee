"""Assembles whole KV blocks from the pools of ranks on CUDA devices and divides them again, on rank 0's device.

A block of the whole model is [layers * 2, KV heads, bytes per head], as it would be with a single rank. If several
ranks hold a head, it is read from the first of them and written to all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spillover.kernels.kv_quant import KVCodec


class RankCodec:
    """The TensorCodec of rank 0's link, for blocks whose parts are in the pools of all ranks."""

    def __init__(self, pools: list[tuple[Tensor, range]], num_heads: int, inner: KVCodec | None) -> None:
        """Make the codec. `pools`: the pool of every rank [num_blocks + 1, layers * 2, heads, bytes] uint8, rank 0's
        first, with its range of the model's `num_heads` heads. `inner`: narrows whole blocks; None: they stay as is."""
        assert {head for _, heads in pools for head in heads} == set(range(num_heads))
        self._pools = [(pool, slice(heads.start, heads.stop)) for pool, heads in pools]
        _, rows, _, head_bytes = pools[0][0].shape
        self._shape = rows, num_heads, head_bytes
        self._inner = inner
        self.slot_bytes = rows * num_heads * head_bytes if inner is None else inner.slot_bytes

    def encode_pool(self, pool: Tensor, blocks: Tensor) -> Tensor:
        whole = self._room(blocks)
        for each, heads in reversed(self._pools):  # reversed so that the first rank that holds a head is read
            whole[:, :, heads] = each[blocks]
        flat = whole.view(len(blocks), -1)
        if self._inner is None:
            return flat
        return self._inner.encode_pool(flat, torch.arange(len(flat), device=flat.device))

    def decode_pool(self, slots: Tensor, pool: Tensor, blocks: Tensor) -> None:
        if self._inner is None:
            whole = slots.view(len(blocks), *self._shape)
        else:
            whole = self._room(blocks)
            self._inner.decode_pool(slots, whole.view(len(blocks), -1), torch.arange(len(blocks), device=blocks.device))
        for each, heads in self._pools:
            each[blocks] = whole[:, :, heads]

    def _room(self, blocks: Tensor) -> Tensor:
        return torch.empty(len(blocks), *self._shape, dtype=torch.uint8, device=blocks.device)
