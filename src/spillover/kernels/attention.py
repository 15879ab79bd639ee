"""Attention over the paged KV pool, and the store of new keys and values in it.

A pool is one tensor [num_blocks, group_layers, 2, kv_heads, block_size * head_dim]; layer l uses pool[:, l]. In a
block, values are [kv_heads, block_size, head_dim], and so are the keys of a 16-bit pool, so that a new token writes few
sectors of a GPU's memory; float32 keys are [kv_heads, head_dim, block_size], so that a vector of a CPU holds one
dimension of consecutive tokens. A quantised pool has bytes, and kv_quant.py describes the layout of a head in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spillover.kernels import kv_quant, native
from spillover.kernels.batch import AttentionBatch, OffloadedPrefix
from spillover.kernels.extents import MOST_SCORES, split_blocks

KV_LAYOUT = "block,layer,[k:head,dim,token|v:head,token,dim],16-bit:[k:head,token,dim]"
POOL_KINDS = {"auto": 0, "fp8": 1, "int8": 2}  # numbers of the types of pools in attention.cpp


def store_kv(k: Tensor, v: Tensor, kv_layer: Tensor, batch: AttentionBatch) -> None:
    """Write k and v [T, Hk, D] at their positions into kv_layer [num_blocks, 2, Hk, block_size * D]."""
    library = native.library()
    rows, heads, dim = k.shape
    k_stride, *k_inner = k.stride()
    v_stride, *v_inner = v.stride()
    block_stride = native_block_stride(kv_layer, k, heads, dim, batch)
    if library is None or block_stride is None or not k_inner == v_inner == [dim, 1]:
        return store_kv_reference(k, v, kv_layer, batch)
    library.store_kv(
        *(k.data_ptr(), k_stride, v.data_ptr(), v_stride, kv_layer.data_ptr(), block_stride),
        *batch.store_arguments,
        *(rows, heads, dim, batch.block_size, POOL_KINDS[batch.kv_dtype]),
    )
    return None


def attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    layer: int = 0,
) -> Tensor:
    """Compute attention, q [T, H, D] -> [T, H, D]. A query at position p sees keys j with p - window < j <= p; sinks
    [H] is one more logit per head that enters the softmax's denominator only. `layer`: index of the layer, which
    selects the blocks of an offloaded prefix."""
    library = native.library()
    rows, heads, dim = q.shape
    kv_heads = kv_layer.shape[2]
    q_stride, *q_inner = q.stride()
    block_stride = native_block_stride(kv_layer, q, kv_heads, dim, batch)
    if library is None or block_stride is None or q_inner != [dim, 1]:
        if batch.offloaded is not None:
            return offloaded_attention_reference(q, kv_layer, batch, batch.offloaded, layer, scale, sinks)
        return attention_reference(q, kv_layer, batch, scale, window, sinks)
    if sinks is not None:
        sinks = sinks.float().contiguous()
    out = torch.empty(rows, heads, dim)
    arguments = (
        *(q.data_ptr(), q_stride, kv_layer.data_ptr(), block_stride, out.data_ptr()),
        *batch.query_arguments,
        *(heads, kv_heads, dim, batch.block_size, scale, window or 0, None if sinks is None else sinks.data_ptr()),
        POOL_KINDS[batch.kv_dtype],
    )
    if batch.offloaded is None:
        library.attention(*arguments)
        return out
    if batch.offloaded.addresses is not None:
        library.attention_in_place(
            *arguments,
            *(batch.offloaded.addresses.data_ptr(), layer * kv_layer[0].nbytes, batch.offloaded.num_blocks),
        )
        return out
    split = split_blocks(batch.block_size)
    totals = torch.empty(library.attention_total_floats(rows, heads, kv_heads, dim))
    first = 0
    for stage in batch.offloaded.segments(layer):
        last = first + stage.shape[0]
        ends = last == batch.offloaded.num_blocks
        stride = native_block_stride(stage, q, kv_heads, dim, batch)
        if stride is None or not (ends or last % split == 0):
            raise ValueError("a segment must be laid out as the pool's blocks and consist of whole splits")
        last_split = -(-batch.offloaded.length // (split * batch.block_size)) if ends else last // split
        library.attention_range(
            *arguments,
            *(stage.data_ptr(), stride, first, last, first // split, last_split, totals.data_ptr(), ends),
        )
        first = last
    return out


def store_kv_reference(k: Tensor, v: Tensor, kv_layer: Tensor, batch: AttentionBatch) -> None:
    index = torch.div(batch.positions, batch.block_size, rounding_mode="floor")
    blocks = batch.block_table[batch.rows.long(), index].long()  # [T]
    offsets = batch.positions - index * batch.block_size
    if batch.kv_dtype == "auto":
        keys, values = _keys_and_values(kv_layer, batch.block_size)
        keys[blocks, :, :, offsets] = k
        values[blocks, :, offsets] = v
        return
    keys, key_scales, values, value_scales = kv_quant.views(kv_layer, batch.block_size)
    keys[blocks, :, :, offsets], key_scales[blocks, :, offsets] = kv_quant.encode(k, batch.kv_dtype)
    values[blocks, :, offsets], value_scales[blocks, :, offsets] = kv_quant.encode(v, batch.kv_dtype)


def attention_reference(
    q: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    heads, dim = q.shape[1:]
    kv_heads = kv_layer.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts, lengths = batch.query_start.tolist(), batch.seq_lens.tolist()
    for request, length in enumerate(lengths):
        first, last = starts[request], starts[request + 1]
        if first == last:
            continue
        # Only blocks that some row sees are read: those before the window or past the end may contain anything.
        oldest = 0 if window is None else max(0, length - (last - first) - window + 1)
        first_block = oldest // batch.block_size
        blocks = batch.block_table[request, first_block : -(-length // batch.block_size)].long()
        seen = slice(oldest - first_block * batch.block_size, length - first_block * batch.block_size)
        k, v = (x[:, seen] for x in _read(kv_layer[blocks], batch, q.dtype))  # [Hk, S, D]
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


def offloaded_attention_reference(
    q: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    offloaded: OffloadedPrefix,
    layer: int,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend for one request: first to the segments, which every row sees, then to its blocks in the pool."""
    total = _Softmax(q.transpose(0, 1), kv_layer.shape[2], scale, sinks)
    most = 1
    for segment in offloaded.segments(layer):
        total.add(*_read(segment, batch, q.dtype))
        most = max(most, segment.shape[0])
    for start in range(0, len(offloaded.resident), most):
        first = (offloaded.num_blocks + start) * batch.block_size
        blocks = _read(kv_layer[offloaded.resident[start : start + most]], batch, q.dtype)
        k, v = (x[:, : offloaded.length - first] for x in blocks)
        total.add(k, v, batch.positions - first)
    return (total.out / total.weight).to(q.dtype).transpose(0, 1).contiguous()


class _Softmax:
    """A softmax over keys added in parts, and the sum of values it weighs. Scores are computed a few rows at a time."""

    def __init__(self, q: Tensor, kv_heads: int, scale: float, sinks: Tensor | None) -> None:
        self.q = q  # [H, rows, D]
        self.kv_heads = kv_heads
        self.scale = scale
        heads, rows, _ = q.shape
        self.out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        if sinks is None:
            self.peak = torch.full((heads, rows, 1), float("-inf"), device=q.device)
            self.weight = torch.zeros_like(self.peak)
        else:
            self.peak = sinks.float()[:, None, None].repeat(1, rows, 1)
            self.weight = torch.ones_like(self.peak)

    def add(self, k: Tensor, v: Tensor, last: Tensor | None = None) -> None:
        """Add keys and values [Hk, S, D]; a row sees keys up to last[row], or all if `last` is None. Every row must
        see the first part."""
        heads, rows, dim = self.q.shape
        step = max(1, MOST_SCORES // (heads * k.shape[1]))
        for start in range(0, rows, step):
            part = slice(start, start + step)
            query = self.q[:, part].reshape(self.kv_heads, -1, dim)
            scores = (query @ k.transpose(1, 2)).float().view(heads, -1, k.shape[1]) * self.scale
            if last is not None:
                scores = scores.masked_fill(torch.arange(k.shape[1], device=k.device) > last[part, None], float("-inf"))
            peak = torch.maximum(self.peak[:, part], scores.amax(-1, keepdim=True))
            shrink, weights = (self.peak[:, part] - peak).exp(), (scores - peak).exp()
            self.peak[:, part] = peak
            self.weight[:, part] = self.weight[:, part] * shrink + weights.sum(-1, keepdim=True)
            added = (weights.to(v.dtype).view(self.kv_heads, -1, k.shape[1]) @ v).view(heads, -1, dim)
            self.out[:, part] = self.out[:, part] * shrink + added


def native_block_stride(
    kv_layer: Tensor, rows: Tensor, kv_heads: int, dim: int, batch: AttentionBatch
) -> int | None:
    """Return the stride between blocks, or None if the native kernels do not apply: they need float32 on a CPU, and a
    block size and head dimension that are multiples of 8."""
    stride, *inner = kv_layer.stride()
    if batch.kv_dtype == "auto":
        size, wanted = batch.block_size * dim, rows.dtype
    else:
        size, wanted = kv_quant.head_bytes(batch.block_size, dim), torch.uint8
    if kv_layer.dtype is not wanted:
        raise ValueError(f"a pool of {kv_layer.dtype} does not hold {batch.kv_dtype} KV of {rows.dtype} rows")
    if batch.block_size % 8 or dim % 8 or inner != [kv_heads * size, size, 1]:
        return None
    return stride if rows.dtype is torch.float32 and rows.is_cpu else None


def _read(blocks: Tensor, batch: AttentionBatch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values [Hk, n * block_size, D] of blocks [n, 2, Hk, size], in the order of blocks."""
    if batch.kv_dtype != "auto":
        blocks = kv_quant.decode_blocks(blocks, batch.block_size, batch.kv_dtype, dtype)
    keys, values = (each.to(dtype) for each in _keys_and_values(blocks, batch.block_size))
    return keys.permute(1, 0, 3, 2).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)


def _keys_and_values(kv_layer: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Return views of keys [num_blocks, Hk, D, block_size] and values [num_blocks, Hk, block_size, D]."""
    blocks, _, heads, size = kv_layer.shape
    dim = size // block_size
    return kv_quant.key_view(kv_layer[:, 0], block_size, dim), kv_layer[:, 1].view(blocks, heads, block_size, dim)
