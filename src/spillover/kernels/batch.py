"""Inputs of the kernels of every device: the shape and the weights of a layer, and the batch of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, TypedDict

import torch
from torch import Tensor

from spillover.kernels.formats.base import Linear

if TYPE_CHECKING:
    from spillover.kernels.moe.moe import LayerExperts


@dataclass(frozen=True)
class LayerShape:
    """The dimensions and constants that all layers of a model share."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # factor of attention scores
    eps: float  # number that RMS norms add to the mean square


class LayerWeights(TypedDict, total=False):
    """The weights of a layer; biases, norms of heads and sinks only if the model has them, gate_up and down if it is
    dense, router and experts if it is a mixture."""

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
    router: Linear
    router_bias: Tensor
    experts: LayerExperts  # computes the experts; their stacks are present too if they are on the device


@dataclass(frozen=True)
class DecodeScratch:
    """Buffers for the sums of pieces of attention, up to `items` of them, of sequences in `slots` slots; for one launch
    at a time."""

    sums: Tensor  # [items, H, D] float32
    stats: Tensor  # [items, H, 2] float32: largest score, sum of weights
    finished: Tensor  # [slots * Hk] int32: number of completed pieces of a sequence; 0 between launches

    @staticmethod
    def make(items: int, slots: int, heads: int, kv_heads: int, dim: int, device: torch.device) -> DecodeScratch:
        return DecodeScratch(
            torch.empty(items, heads, dim, device=device),
            torch.empty(items, heads, 2, device=device),
            torch.zeros(slots * kv_heads, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class DeviceWork:
    """The division of a batch into programs, made by the host, which knows all lengths, per step and layer group."""

    splits: Tensor | None  # [I, FIELDS] int32: pieces of requests with one new token; None if there are none
    num_splits: Tensor | None  # [1] int32: number of valid rows of `splits`
    tiles: Tensor | None  # [tiles, 2] int32: query tiles of requests with more new tokens; None if there are none
    slots: Tensor | None  # [B] int32: each request's row of the block table; None: row i for request i
    scratch: DecodeScratch | None
    short: Tensor | None = None  # [I, FIELDS] int32: pieces of requests with a few new tokens; None if there are none
    num_short: Tensor | None = None  # [1] int32: number of valid rows of `short`


class OffloadedPrefix(Protocol):
    """The first blocks of a sequence longer than the pool, which are kept outside the pool and pass through a stage."""

    num_blocks: int
    length: int  # number of tokens in the cache once this step's tokens are stored
    resident: Tensor  # [n] int64: the blocks after this prefix, all in the pool
    addresses: Tensor | None  # [num_blocks] int64: addresses for a CPU to read blocks in place, laid out as in the pool

    def segments(self, layer: int) -> Iterator[Tensor]:
        """Yield the blocks of one layer in order, [n, 2, kv_heads, size] at a time; a segment is valid until the next
        one is requested. All but the last consist of whole splits (`split_blocks`)."""
        ...


@dataclass(frozen=True)
class AttentionBatch:
    """The batch of one step for one layer group: B requests whose new tokens are T rows, in order of requests."""

    query_start: Tensor  # [B + 1] int32, first row of each request among the T rows
    seq_lens: Tensor  # [B] int32, number of tokens in the cache once this step's tokens are stored
    block_table: Tensor  # [B, max_blocks] int32; entry i holds positions [i*bs, (i+1)*bs); 0 is the dummy block
    positions: Tensor  # [T] int64
    rows: Tensor  # [T] int32, the request each row belongs to
    block_size: int
    kv_dtype: str = "auto"  # type of the pool: "auto" is the type of the rows, "fp8" and "int8" are codes
    offloaded: OffloadedPrefix | None = None  # first blocks of the only request, whose block_table has 0 for them
    work: DeviceWork | None = None  # CUDA: the division of the step into programs

    def __post_init__(self) -> None:
        """Check the batch once per step, so that the kernels need not check it in every layer."""
        if self.offloaded is not None and self.seq_lens.shape[0] != 1:
            raise ValueError("a request with an offloaded prefix must be alone in its batch")
        for tensor in (self.query_start, self.seq_lens, self.block_table, self.rows):
            if tensor.dtype is not torch.int32 or tensor.stride(-1) != 1:
                raise ValueError("query_start, seq_lens, block_table and rows must be int32 and contiguous")
        if self.positions.dtype is not torch.int64 or self.positions.stride(0) != 1:
            raise ValueError("positions must be int64 and contiguous")

    @cached_property
    def query_arguments(self) -> tuple[int, ...]:
        """Return those arguments of the native attention that are the same in every layer."""
        index = (self.query_start, self.seq_lens, self.block_table)
        return (*(x.data_ptr() for x in index), self.block_table.stride(0), self.seq_lens.shape[0])

    @cached_property
    def store_arguments(self) -> tuple[int, ...]:
        index = (self.positions, self.rows, self.block_table)
        return (*(x.data_ptr() for x in index), self.block_table.stride(0))
