"""What a step and a layer are to the kernels of every device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypedDict

import torch
from torch import Tensor

from spillover.kernels.formats.base import Linear


@dataclass(frozen=True)
class LayerShape:
    """What the layers of a model have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    eps: float


class LayerWeights(TypedDict, total=False):
    """A dense layer's weights; of biases, norms of heads and sinks those that the model has."""

    input_norm: Tensor
    qkv: Linear
    qkv_bias: Tensor
    q_norm: Tensor
    k_norm: Tensor
    sinks: Tensor
    o: Linear
    o_bias: Tensor
    mlp_norm: Tensor
    gate_up: Linear
    gate_up_bias: Tensor
    down: Linear
    down_bias: Tensor


@dataclass(frozen=True)
class DecodeScratch:
    """Where pieces leave their sums, for up to `items` items of sequences in `slots` slots. One launch at a time."""

    sums: Tensor  # [items, H, D] float32
    stats: Tensor  # [items, H, 2] float32: largest score, sum of weights
    finished: Tensor  # [slots * Hk] int32: pieces of a sequence that are done; 0 between launches

    @staticmethod
    def make(items: int, slots: int, heads: int, kv_heads: int, dim: int, device: torch.device) -> DecodeScratch:
        return DecodeScratch(
            torch.empty(items, heads, dim, device=device),
            torch.empty(items, heads, 2, device=device),
            torch.zeros(slots * kv_heads, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class DeviceWork:
    """How a batch is cut into programs. Made by the host, which knows every length, once a step and layer group."""

    splits: Tensor | None  # [I, FIELDS] int32, decode splits of requests with one new token; None: there are none
    num_splits: Tensor | None  # [1] int32: how many of them count
    tiles: Tensor | None  # [tiles, 2] int32 of requests with more new tokens; None: there are none
    slots: Tensor | None  # [B] int32, each request's row of the block table; None: its own index
    scratch: DecodeScratch | None
    short: Tensor | None = None  # [I, FIELDS] int32, splits of requests with a few new tokens; None: there are none
    num_short: Tensor | None = None  # [1] int32: how many of them count


class OffloadedPrefix(Protocol):
    """The first blocks of a sequence that is longer than the pool. They wait elsewhere and pass through a stage."""

    num_blocks: int
    length: int  # tokens in the cache once this step's are stored
    resident: Tensor  # [n] int64, the blocks that follow these and lie in the pool
    addresses: Tensor | None  # [num_blocks] int64, where a CPU can read them in place, laid out as in the pool

    def segments(self, layer: int) -> Iterator[Tensor]:
        """Yield the blocks of one layer in order, [n, 2, kv_heads, size] at a time; each is gone when the next is asked
        for. All but the last are whole splits (`split_blocks`)."""
        ...


@dataclass(frozen=True)
class AttentionBatch:
    """One step over one layer group: B requests whose new tokens are T rows, request after request."""

    query_start: Tensor  # [B + 1] int32, first row of each request among the T rows
    seq_lens: Tensor  # [B] int32, tokens in the cache once this step's are stored
    block_table: Tensor  # [B, max_blocks] int32; entry i holds positions [i*bs, (i+1)*bs); 0 is the dummy block
    positions: Tensor  # [T] int64
    rows: Tensor  # [T] int32, the request each row belongs to
    block_size: int
    kv_dtype: str = "auto"  # of the pool: "auto" is the rows' own type, "fp8" and "int8" are codes
    cold: OffloadedPrefix | None = None  # of the only request; its table entries of these blocks are 0
    work: DeviceWork | None = None  # CUDA: how the step is cut into programs

    def __post_init__(self) -> None:
        """Check the batch once a step, so that the kernels need not look again in every layer."""
        if self.cold is not None and self.seq_lens.shape[0] != 1:
            raise ValueError("a request with a cold prefix is alone in its batch")
        for tensor in (self.query_start, self.seq_lens, self.block_table, self.rows):
            if tensor.dtype is not torch.int32 or tensor.stride(-1) != 1:
                raise ValueError("query_start, seq_lens, block_table and rows are to be int32 and contiguous")
        if self.positions.dtype is not torch.int64 or self.positions.stride(0) != 1:
            raise ValueError("positions is to be int64 and contiguous")

    @cached_property
    def query_arguments(self) -> tuple[int, ...]:
        """Return the arguments of the native attention, the same in every layer."""
        index = (self.query_start, self.seq_lens, self.block_table)
        return (*(x.data_ptr() for x in index), self.block_table.stride(0), self.seq_lens.shape[0])

    @cached_property
    def store_arguments(self) -> tuple[int, ...]:
        index = (self.positions, self.rows, self.block_table)
        return (*(x.data_ptr() for x in index), self.block_table.stride(0))
