"""Lays out steps for a CUDA device: chooses their shapes, writes their arrays, cuts attention into pieces and tiles."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from spillover.engine.batch.request_table import RequestTable, StepLimits
from spillover.engine.batch.step_layout import ItemArrays, write_step
from spillover.engine.cuda.decode_inputs import UPDATE_BYTES, DecodeInputs
from spillover.engine.cuda.step_inputs import InputOffsets, StepInputs, StepShape
from spillover.kernels.triton.attention import ordered_splits
from spillover.kernels.triton.attention.ordered_splits import TILE_QUERIES, prefill_tiles
from spillover.models.layers import Decoder

_NO_TILES, _NO_SPLITS = np.empty((0, 2), dtype=np.int32), np.empty((0, ordered_splits.FIELDS), dtype=np.int32)
MAX_PREFILL_REQUESTS = 32  # maximum number of requests with several rows in a step captured as a CUDA graph


class StepWriter:
    """Writes steps to pinned inputs and sends them; a decode-only step is written over a template of its size."""

    def __init__(self, model: Decoder, limits: StepLimits, table: RequestTable, device: torch.device) -> None:
        self._limits = limits
        self._table = table
        self._kv_heads = model.config.num_kv_heads
        self._windows = [group.window for group in model.groups]
        # Maximum pieces of requests with a few rows: each takes one scratch item per row; an uncut request takes none.
        self._most_pieces = min(ordered_splits.MOST_ITEMS, ordered_splits.max_items(
            limits.max_num_seqs + 1, limits.max_model_len, self._kv_heads) // ordered_splits.QUERIES)
        self._most_short = max(self._most_pieces, limits.max_num_seqs + 1 if limits.draft_tokens else 0)
        # Padding of prefill steps is cut into padding requests of at most one tile each, in the dummy block.
        self._padding_rows = min(TILE_QUERIES, limits.max_model_len)
        # Maximum number of requests with several rows in a captured step: all of them where drafts are verified.
        self.most_several = max(MAX_PREFILL_REQUESTS, limits.max_num_seqs if limits.draft_tokens else 0)
        self._offsets: dict[StepShape, InputOffsets] = {}  # offsets of the shapes of padded steps
        self.inputs = StepInputs(self._input_bytes(), device)
        self._templates: dict[int, DecodeInputs] = {}  # templates of decode-only steps, by number of rows

    def send(self, items: ItemArrays, shape: StepShape | None, decodes: bool, result_row: int,
             updates: npt.NDArray[np.int32] | None = None) -> tuple[InputOffsets, int | None]:
        """Write a step and send it to the device. `shape`: the shape it is padded to, None if it is not padded;
        `decodes`: the step only decodes; `result_row`: the row of the results that its tokens go to; `updates`: block
        table updates of at most UPDATE_BYTES to send with it. Returns the offsets of its arrays and of the updates."""
        self.inputs.begin()
        if decodes and shape is not None:
            template = self._template(shape)
            return template.offsets, template.send(items, result_row, updates)
        offsets, end = self.write(items, shape, result_row)
        place = None
        if updates is not None:
            place, end = offsets.end, offsets.end + updates.nbytes
            self.inputs.pinned.array(self.inputs.buffer, place, len(updates))[:] = updates
        self.inputs.send(self.inputs.pinned, end)
        return offsets, place

    def write(self, items: ItemArrays, shape: StepShape | None, result_row: int) -> tuple[InputOffsets, int]:
        """Write a step into the inputs; return the offsets of its arrays, and the offset at which they end."""
        offsets = self._padded(shape) if shape is not None else self._offsets_of(self._own_shape(items))
        pinned, buffer, shape = self.inputs.pinned, self.inputs.buffer, offsets.shape
        into = pinned.arrays(buffer, offsets)
        write_step(into, items, self._table, shape.padding_rows)
        pinned.array(buffer, offsets.result_row, 1)[0] = result_row
        starts, counts = into.query_start[:-1].astype(np.int64), np.diff(into.query_start).astype(np.int64)
        all_lengths = into.seq_lens.astype(np.int64)
        few, whole = ordered_splits.short_chunks(counts, all_lengths, self._kv_heads, shape.short, self._most_pieces)
        for place, window in zip(offsets.short, self._windows, strict=True) if shape.short else ():
            short = ordered_splits.short_chunk_splits(starts[few], into.slots[few].astype(np.int64), all_lengths[few],
                                                      counts[few], window, whole)
            assert len(short) <= shape.short, "more items than there is room for"
            pinned.write_pieces(buffer, place, short)
        several = np.flatnonzero((counts > 1) & ~few)
        tiles = prefill_tiles(several, counts[several]) if len(several) else _NO_TILES
        assert len(tiles) <= shape.tiles, "a graph that was captured for fewer tiles"
        all_tiles = pinned.array(buffer, offsets.tiles, 2 * shape.tiles).reshape(-1, 2)
        all_tiles[:len(tiles)] = tiles
        all_tiles[len(tiles):] = (shape.requests - 1, 0)
        single = counts == 1
        slots, lengths, work, end = into.slots[single].astype(np.int64), all_lengths[single], _NO_SPLITS, offsets.end
        for place, window in zip(offsets.work, self._windows, strict=True):
            if len(slots):
                work = ordered_splits.decode_splits(starts[single], slots, lengths, self._kv_heads, window)
            end = pinned.write_pieces(buffer, place, work)
        return offsets, end

    def prompt_shape(self, rows: int) -> StepShape:
        """Return the padded shape of a prefill graph of `rows` rows. Unused attention tiles point at the last padding
        request, which has no rows."""
        most, padding_rows = self._limits.max_num_seqs, self._padding_rows
        padding_requests = -(-rows // padding_rows)
        tiles = padding_requests + 2 + min(self.most_several, rows // 2)
        return StepShape(rows, most + padding_requests + 1, min(rows, self._limits.max_samples), tiles, padding_rows,
                         self._most_short)

    def _own_shape(self, items: ItemArrays) -> StepShape:
        """Return the shape of a step without padding."""
        tiled = items.counts[items.counts > 1]
        short = self._most_short if bool((tiled <= ordered_splits.QUERIES).any()) else 0
        return StepShape(items.num_rows, len(items.slots), items.num_samples, int((-(-tiled // TILE_QUERIES)).sum()),
                         short=short)

    def _offsets_of(self, shape: StepShape) -> InputOffsets:
        return InputOffsets.of(shape, len(self._windows), self._limits.max_model_len, self._kv_heads)

    def _padded(self, shape: StepShape) -> InputOffsets:
        """Return the offsets of the shape of a padded step, computed once per shape."""
        if shape not in self._offsets:
            self._offsets[shape] = self._offsets_of(shape)
        return self._offsets[shape]

    def _template(self, shape: StepShape) -> DecodeInputs:
        if shape.rows not in self._templates:
            self._templates[shape.rows] = DecodeInputs(self.inputs, self._padded(shape), self._table, self._kv_heads,
                                                       self._windows)
        return self._templates[shape.rows]

    def _input_bytes(self) -> int:
        """Return the number of bytes of the largest step's inputs, block table updates included."""
        limits = self._limits
        tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        prompts = self.prompt_shape(limits.captured_rows)
        most = StepShape(tokens, prompts.requests, limits.max_samples, tokens + prompts.tiles, short=self._most_short)
        return self._offsets_of(most).end + UPDATE_BYTES
