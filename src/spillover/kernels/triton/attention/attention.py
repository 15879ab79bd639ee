"""Attention of a whole batch: one kernel for requests with one new token, another for requests with more."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from spillover.kernels.batch import AttentionBatch, DecodeScratch, DeviceWork
from spillover.kernels.triton.attention import ordered_splits
from spillover.kernels.triton.attention.ordered_decode import ordered_decode, ordered_short_chunks
from spillover.kernels.triton.attention.ordered_prefill import ordered_prefill


def attention(
    q: Tensor, kv_layer: Tensor, batch: AttentionBatch, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Attend as `kernels.attention.attention` does."""
    work = batch.work or make_work(batch, q.shape[1], kv_layer.shape[2], q.shape[2], window)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if work.splits is not None and work.num_splits is not None and work.scratch is not None:
        ordered_decode(q, kv_layer, out, work.splits, work.num_splits, batch.block_table, batch.block_size,
                       work.scratch, scale, window, sinks, batch.kv_dtype, batch.seq_lens.shape[0])
    if work.short is not None and work.num_short is not None and work.scratch is not None:
        ordered_short_chunks(q, kv_layer, out, work.short, work.num_short, batch.block_table, batch.block_size,
                             work.scratch, scale, window, sinks, batch.kv_dtype)
    if work.tiles is not None:
        ordered_prefill(q, kv_layer, out, work.tiles, batch.query_start, batch.seq_lens, work.slots,
                        batch.block_table, batch.block_size, scale, window, sinks, batch.kv_dtype)
    return out


def make_work(batch: AttentionBatch, heads: int, kv_heads: int, dim: int, window: int | None) -> DeviceWork:
    """Make the work lists of a batch that has none; waits for the device, to read the lengths."""
    device = batch.seq_lens.device
    starts = batch.query_start.cpu().numpy().astype(np.int64)
    counts = np.diff(starts)
    lengths = batch.seq_lens.cpu().numpy().astype(np.int64)
    most = max(len(counts), ordered_splits.MOST_ITEMS)
    few, whole = ordered_splits.short_chunks(counts, lengths, kv_heads, most, ordered_splits.MOST_ITEMS)
    single, chosen, tiled = np.nonzero(counts == 1)[0], np.nonzero(few)[0], np.nonzero((counts > 1) & ~few)[0]
    splits = torch.from_numpy(ordered_splits.decode_splits(starts[single], single, lengths[single], kv_heads,
                                                           window)).to(device)
    short = torch.from_numpy(ordered_splits.short_chunk_splits(starts[chosen], chosen, lengths[chosen],
                                                               counts[chosen], window, whole)).to(device)
    tiles = torch.from_numpy(ordered_splits.prefill_tiles(tiled, counts[tiled])).to(device)
    room = max(len(splits), ordered_splits.QUERIES * len(short))
    return DeviceWork(
        splits=splits if len(splits) else None,
        num_splits=torch.tensor([len(splits)], dtype=torch.int32, device=device),
        tiles=tiles if len(tiles) else None,
        slots=None,
        scratch=DecodeScratch.make(room, len(counts), heads, kv_heads, dim, device),
        short=short if len(short) else None,
        num_short=torch.tensor([len(short)], dtype=torch.int32, device=device),
    )
