"""Drafting passes of a head on a CUDA device: each has one row per request; they are launched without waiting.

The host sends the inputs of the first pass. Every pass writes its tokens, the hidden states that they follow and the
advanced positions to where the next pass reads them, so one CUDA graph serves every pass of the same size. The drafted
tokens are stored after those that the last step sampled; the step that verifies them reads them there, without waiting
until the host has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spillover.engine.batch.draft_head import DraftHead
from spillover.engine.batch.request_table import NO_UPDATES, BlockUpdates, RequestTable, StepLimits
from spillover.engine.batch.step_layout import StepArrays
from spillover.engine.cuda.graphs import Graphs, Key, ladder
from spillover.engine.cuda.step_inputs import (
    HEADER,
    InputOffsets,
    PinnedPair,
    StepInputs,
    StepShape,
    aligned,
    table_updates,
)
from spillover.engine.step import ON_DEVICE, DraftItem, HeadDrafts
from spillover.kernels.batch import AttentionBatch, DecodeScratch, DeviceWork
from spillover.kernels.triton.attention import ordered_splits
from spillover.kernels.triton.draft_pass import end_pass
from spillover.kernels.triton.draw import draw
from spillover.kernels.triton.step_upload import update_tables

DRAFTS_KEPT = 4  # maximum number of drafts that are in flight to the host, or have arrived and are not read yet

i32, i64 = torch.int32, torch.int64


@dataclass(frozen=True)
class Drafts:
    """Drafts that are available on the host once a later step has completed."""

    ids: Sequence[int]  # ids of the requests
    results: Tensor  # drafted tokens [passes, requests], copied to pinned memory
    begun: torch.cuda.Event | None  # None on a device without asynchronous launches
    ended: torch.cuda.Event | None

    def tokens(self) -> dict[int, list[int]]:
        return dict(zip(self.ids, self.results.T.tolist(), strict=True))

    def seconds(self) -> float:
        return 0.0 if self.begun is None or self.ended is None else self.begun.elapsed_time(self.ended) / 1e3


class DraftPasses:
    def __init__(self, head: DraftHead, table: RequestTable, limits: StepLimits, block_size: int, kv_dtype: str,
                 draws: Tensor) -> None:
        """Allocate the memory of the passes. `draws`: tokens sampled in the last step, followed by space for drafts."""
        device = draws.device
        layer, most = head.head.config.layer, limits.max_num_seqs
        self._head = head
        self._table = table
        self._block_size = block_size
        self._kv_dtype = kv_dtype
        self._kv_heads = layer.num_kv_heads
        self._longest = limits.max_model_len
        self._device = device
        self._sizes = ladder(most)
        self._places: dict[int, _Places] = {}  # inputs by number of rows
        # Each draft may have new entries of its request's block table, for the newest token and the drafted ones.
        self._update_bytes = aligned(4 * (2 + 2 * most * (2 + limits.draft_tokens // block_size)))
        self._inputs = StepInputs(self._offsets(most).end + self._update_bytes, device)
        items = ordered_splits.max_items(most + 1, self._longest, layer.num_kv_heads)
        self._scratch = DecodeScratch.make(items, most + 1, layer.num_heads, layer.num_kv_heads, layer.head_dim, device)
        self._ids = torch.zeros(most, dtype=i64, device=device)  # input tokens of the next pass
        self._before = torch.zeros(most, layer.hidden_size, dtype=head.kept.rows.dtype, device=device)
        self._drawn = torch.zeros(most, dtype=i64, device=device)
        self._greedy = torch.zeros(most, dtype=torch.float32, device=device)
        self._unused = torch.zeros(most, dtype=torch.float64, device=device)
        self._first = len(draws) - limits.draft_tokens * most
        self._drafted = draws[self._first:].view(limits.draft_tokens, most)
        self._done = torch.zeros(1, dtype=i32, device=device)  # number of completed passes
        self._results = torch.zeros(DRAFTS_KEPT, limits.draft_tokens, most, dtype=i64,
                                    pin_memory=device.type == "cuda")
        self._next_entry = 0  # index of the entry of `_results` that the next drafts go to
        self.last: Drafts | None = None

    def draft(self, items: Sequence[DraftItem], graphs: Graphs | None, wait: bool) -> HeadDrafts:
        """Draft for the requests that can be drafted for. Without `wait` the next step must verify the drafts."""
        found, slots, updates = self._table.begin_drafts(items)
        drafts: list[tuple[int, ...]] = [()] * len(items)
        if not found:
            return HeadDrafts(drafts)
        drafted_items = [items[index] for index in found]
        starts, counts = np.array([(item.start, item.count) for item in drafted_items], dtype=np.int64).T
        tokens = [self._table[item.id].token_ids[item.start] for item in drafted_items]
        ids = [item.id for item in drafted_items]
        self.last = last = Drafts(ids, *self._run(slots, starts, counts, tokens, updates, graphs))
        if wait:
            if last.ended is not None:
                last.ended.synchronize()
            known = last.tokens()
            for index, item in zip(found, drafted_items, strict=True):
                drafts[index] = tuple(known[item.id][:item.count])
            return HeadDrafts(drafts)
        places = (self._first + np.arange(len(found), dtype=np.int32)[:, None]
                  + self._drafted.stride(0) * np.arange(int(counts.max()), dtype=np.int32))
        self._table.drafted = dict(zip(last.ids, places.tolist(), strict=True))
        for index, item in zip(found, drafted_items, strict=True):
            drafts[index] = (ON_DEVICE,) * item.count
        return HeadDrafts(drafts, None if last.ended is None else last.seconds)

    def _run(self, slots: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64],
             tokens: Sequence[int], updates: BlockUpdates, graphs: Graphs | None,
             ) -> tuple[Tensor, torch.cuda.Event | None, torch.cuda.Event | None]:
        """Draft after the newest token of each request. `starts`: its position; `counts`: number of tokens to draft.
        Returns the host tensor that will receive the drafts, and the events before and after the passes."""
        begun = self._event()
        rows, passes = len(slots), int(counts.max())
        size, kept = self._size(rows, graphs), self._head.kept
        offsets = self._send(size, slots, starts, counts, tokens, slots * kept.per_slot + (starts - 1) % kept.per_slot,
                             updates)
        self._ids[:size].copy_(self._inputs.array(offsets, "token_ids"))
        self._head.first(self._inputs.array(offsets, "sample_rows"), self._before[:size])
        self._done.zero_()
        key = Key(size, True, drafts=True)
        for _ in range(passes):
            if graphs is None:
                self._pass(offsets, key)
            else:
                graphs.run(key, partial(self._pass, offsets, key))
        results = self._results[self._next_entry, :passes]
        self._next_entry = (self._next_entry + 1) % DRAFTS_KEPT
        results.copy_(self._drafted[:passes], non_blocking=True)
        return results[:, :rows], begun, self._event()

    def _event(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def capture(self, graphs: Graphs) -> None:
        """Capture the graphs of all sizes now, with padding rows only."""
        for size in reversed(self._sizes):
            nothing = np.zeros(0, dtype=np.int64)
            offsets = self._send(size, nothing, nothing, nothing, (), nothing, NO_UPDATES)
            key = Key(size, True, drafts=True)
            self._done.zero_()
            graphs.run(key, partial(self._pass, offsets, key), at_once=True)

    def _size(self, rows: int, graphs: Graphs | None) -> int:
        return rows if graphs is None else graphs.size(rows)

    def _offsets(self, size: int) -> InputOffsets:
        return InputOffsets.of(StepShape.decodes(size), 1, self._longest, self._kv_heads)

    def _send(self, size: int, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64],
              counts: npt.NDArray[np.int64], tokens: Sequence[int], kept: npt.NDArray[np.int64],
              updates: BlockUpdates) -> InputOffsets:
        """Write the inputs of the first pass and send them, and update the block tables. `counts`: passes of each row,
        stored in the array `sources` of a step; `kept`: indices of the kept hidden states that the tokens follow,
        stored in `sample_rows`."""
        if size not in self._places:
            self._places[size] = _Places(self._offsets(size), self._update_bytes, self._inputs.cuda)
        places, rows = self._places[size], len(slots)
        self._inputs.begin()
        arrays = places.arrays[self._inputs.buffer]
        for into, values, padding in (
                (arrays.positions, positions, 0), (arrays.seq_lens, positions + 1, 1),
                (arrays.slots, slots, self._table.padding), (arrays.sources, counts, 0), (arrays.token_ids, tokens, 0),
                (arrays.sample_rows, kept, 0)):
            into[:rows], into[rows:] = values, padding
        work = ordered_splits.decode_splits(np.arange(size), arrays.slots.astype(np.int64),
                                            arrays.seq_lens.astype(np.int64), self._kv_heads, self._head.window)
        offsets, buffer, count = places.offsets, self._inputs.buffer, len(updates.blocks)
        end = places.pair.write_pieces(buffer, offsets.work[0], work)
        if count:
            place = aligned(end)
            numbers = places.pair.array(buffer, place, 2 + 2 * count)
            numbers[:] = table_updates(updates)
            end = place + numbers.nbytes
        self._inputs.send(places.pair, end)
        if count:
            update_tables(self._table.block_tables, self._inputs.view(place, i32, 2 + 2 * count), count)
        return offsets

    def _pass(self, offsets: InputOffsets, key: Key) -> Tensor:
        """Run one pass, the content of its graph; return the drafted tokens."""
        size = key.rows
        ids, before = self._ids[:size], self._before[:size]
        logits, after = self._head.draft(ids, before, self._batch(offsets))
        draw(logits, self._greedy[:size], self._unused[:size], self._drawn)
        before.copy_(after)
        ids.copy_(self._head.tokens(self._drawn[:size]))
        inputs, start = self._inputs, offsets.work[0]
        end_pass(ids, self._drafted, self._done, inputs.array(offsets, "sources"), inputs.array(offsets, "positions"),
                 inputs.array(offsets, "slots"), self._table.padding, self._items(offsets),
                 inputs.view(start, i32, 1), self._head.window is not None)
        return ids

    def _batch(self, offsets: InputOffsets) -> AttentionBatch:
        inputs = self._inputs
        work = DeviceWork(splits=self._items(offsets), num_splits=inputs.view(offsets.work[0], i32, 1), tiles=None,
                          slots=inputs.array(offsets, "slots"), scratch=self._scratch)
        return AttentionBatch(
            query_start=inputs.array(offsets, "query_start"), seq_lens=inputs.array(offsets, "seq_lens"),
            block_table=self._table.block_tables[0], positions=inputs.array(offsets, "positions"),
            rows=inputs.array(offsets, "row_of"), block_size=self._block_size,
            kv_dtype=self._kv_dtype, work=work)

    def _items(self, offsets: InputOffsets) -> Tensor:
        fields = ordered_splits.FIELDS
        return self._inputs.view(offsets.work[0] + 4 * HEADER, i32, (offsets.work_size - HEADER) // fields, fields)


class _Places:
    """Pinned inputs of passes with one number of rows; the row numbers in them never change."""

    def __init__(self, offsets: InputOffsets, update_bytes: int, cuda: bool) -> None:
        self.offsets = offsets
        self.pair = PinnedPair(offsets.end + update_bytes, cuda)
        self.arrays: list[StepArrays] = [self.pair.arrays(buffer, offsets) for buffer in range(2)]
        for arrays in self.arrays:
            arrays.row_of[:] = np.arange(offsets.shape.rows)
            arrays.query_start[:] = np.arange(offsets.shape.rows + 1)
