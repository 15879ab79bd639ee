"""Attention over the paged KV pool, and the store that fills it.

A pool is one tensor [num_blocks, group_layers, 2, kv_heads, block_size * head_dim]; a layer sees pool[:, l]. In a
block the keys lie [kv_heads, head_dim, block_size], so that a vector holds one dimension of consecutive tokens, and the
values [kv_heads, block_size, head_dim].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spillover.kernels import native

KV_LAYOUT = "block,layer,[k:head,dim,token|v:head,token,dim]"


@dataclass(frozen=True)
class AttentionBatch:
    """One step over one layer group: B requests whose new tokens are T rows, request after request."""

    query_start: Tensor  # [B + 1] int32, first row of each request among the T rows
    seq_lens: Tensor  # [B] int32, tokens in the cache once this step's are stored
    block_table: Tensor  # [B, max_blocks] int32; entry i holds positions [i*bs, (i+1)*bs); 0 is the dummy block
    positions: Tensor  # [T] int64
    rows: Tensor  # [T] int32, the request each row belongs to
    block_size: int
    max_query: int  # most rows of one request
    max_seq: int  # longest of seq_lens

    def __post_init__(self) -> None:
        """Once a step, so that the kernels need not look again in every layer."""
        for tensor in (self.query_start, self.seq_lens, self.block_table, self.rows):
            if tensor.dtype is not torch.int32 or tensor.stride(-1) != 1:
                raise ValueError("query_start, seq_lens, block_table and rows are to be int32 and contiguous")
        if self.positions.dtype is not torch.int64 or self.positions.stride(0) != 1:
            raise ValueError("positions is to be int64 and contiguous")

    @cached_property
    def query_arguments(self) -> tuple[int, ...]:
        """Of the native attention, the same in every layer."""
        index = (self.query_start, self.seq_lens, self.block_table)
        return (*(x.data_ptr() for x in index), self.block_table.stride(0), self.seq_lens.shape[0])

    @cached_property
    def store_arguments(self) -> tuple[int, ...]:
        index = (self.positions, self.rows, self.block_table)
        return (*(x.data_ptr() for x in index), self.block_table.stride(0))


def store_kv(k: Tensor, v: Tensor, kv_layer: Tensor, batch: AttentionBatch) -> None:
    """Writes k and v [T, Hk, D] at their positions into kv_layer [num_blocks, 2, Hk, block_size * D]."""
    library = native.library()
    rows, heads, dim = k.shape
    k_stride, *k_inner = k.stride()
    v_stride, *v_inner = v.stride()
    block_stride = native_block_stride(kv_layer, k, heads, dim, batch.block_size)
    if library is None or block_stride is None or not k_inner == v_inner == [dim, 1]:
        return store_kv_reference(k, v, kv_layer, batch)
    library.store_kv(
        *(k.data_ptr(), k_stride, v.data_ptr(), v_stride, kv_layer.data_ptr(), block_stride),
        *batch.store_arguments,
        *(rows, heads, dim, batch.block_size),
    )
    return None


def attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [T, H, D] -> [T, H, D]. A query at position p sees keys j with p - window < j <= p; sinks [H] is one more logit
    a head that takes part in the softmax's denominator only."""
    library = native.library()
    rows, heads, dim = q.shape
    kv_heads = kv_layer.shape[2]
    q_stride, *q_inner = q.stride()
    block_stride = native_block_stride(kv_layer, q, kv_heads, dim, batch.block_size)
    if library is None or block_stride is None or q_inner != [dim, 1]:
        return attention_reference(q, kv_layer, batch, scale, window, sinks)
    if sinks is not None:
        sinks = sinks.float().contiguous()
    out = torch.empty(rows, heads, dim)
    library.attention(
        *(q.data_ptr(), q_stride, kv_layer.data_ptr(), block_stride, out.data_ptr()),
        *batch.query_arguments,
        *(heads, kv_heads, dim, batch.block_size, scale, window or 0, None if sinks is None else sinks.data_ptr()),
    )
    return out


def store_kv_reference(k: Tensor, v: Tensor, kv_layer: Tensor, batch: AttentionBatch) -> None:
    keys, values = _keys_and_values(kv_layer, batch.block_size)
    index = torch.div(batch.positions, batch.block_size, rounding_mode="floor")
    blocks = batch.block_table[batch.rows.long(), index].long()  # [T]
    offsets = batch.positions - index * batch.block_size
    keys[blocks, :, :, offsets] = k
    values[blocks, :, offsets] = v


def attention_reference(
    q: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    keys, values = _keys_and_values(kv_layer, batch.block_size)
    heads, dim = q.shape[1:]
    kv_heads = keys.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts, lengths = batch.query_start.tolist(), batch.seq_lens.tolist()
    for request, length in enumerate(lengths):
        first, last = starts[request], starts[request + 1]
        if first == last:
            continue
        # Only blocks some row sees are read: what lies before the window or past the end may hold anything.
        oldest = 0 if window is None else max(0, length - (last - first) - window + 1)
        first_block = oldest // batch.block_size
        blocks = batch.block_table[request, first_block : -(-length // batch.block_size)].long()
        seen = slice(oldest - first_block * batch.block_size, length - first_block * batch.block_size)
        k = keys[blocks].permute(1, 0, 3, 2).reshape(kv_heads, -1, dim)[:, seen]  # [Hk, S, D]
        v = values[blocks].permute(1, 0, 2, 3).reshape(kv_heads, -1, dim)[:, seen]
        query = q[first:last].transpose(0, 1).reshape(kv_heads, -1, dim)  # [Hk, G * rows, D]
        scores = (query @ k.transpose(1, 2)).float().view(heads, last - first, -1) * scale  # [H, rows, S]
        row = batch.positions[first:last, None]
        column = torch.arange(oldest, length, device=q.device)
        hidden = column > row
        if window is not None:
            hidden |= column <= row - window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.float()[:, None, None].expand(-1, last - first, 1)
            probabilities = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
        else:
            probabilities = scores.softmax(-1)
        weights = probabilities.to(v.dtype).view(kv_heads, -1, length - oldest)
        out[first:last] = (weights @ v).view(heads, last - first, dim).transpose(0, 1)
    return out


def native_block_stride(kv_layer: Tensor, rows: Tensor, kv_heads: int, dim: int, block_size: int) -> int | None:
    """How far blocks lie apart, or None where the native kernels do not apply: they take float32, on the CPU, and whole
    vectors of 8 tokens and 8 dimensions."""
    stride, *inner = kv_layer.stride()
    size = block_size * dim
    if block_size % 8 or dim % 8 or inner != [kv_heads * size, size, 1]:
        return None
    if rows.dtype is not torch.float32 or kv_layer.dtype is not torch.float32 or not kv_layer.is_cpu:
        return None
    return stride


def _keys_and_values(kv_layer: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Views [num_blocks, Hk, D, block_size] and [num_blocks, Hk, block_size, D]."""
    blocks, _, heads, size = kv_layer.shape
    dim = size // block_size
    return kv_layer[:, 0].view(blocks, heads, dim, block_size), kv_layer[:, 1].view(blocks, heads, block_size, dim)
