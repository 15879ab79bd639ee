"""The inputs of decode-only steps of one size: most arrays never change, and a step writes only those that do.

The host's work between two steps runs with cold CPU caches, because a step takes the device long; few calls matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from spillover.engine.batch.request_table import RequestTable
from spillover.engine.batch.step_layout import ItemArrays, write_decodes, write_padding, write_step
from spillover.engine.cuda.step_inputs import HEADER, InputOffsets, PinnedPair, StepInputs
from spillover.kernels.triton.attention import ordered_splits

FEW = 16  # largest number of rows for which attention is cut into pieces without numpy arrays
UPDATE_BYTES = 1 << 15  # bytes reserved after a step's own inputs for new entries of the block tables


class DecodeInputs:
    """A template of inputs that is all padding, over which a step writes its requests."""

    def __init__(self, inputs: StepInputs, offsets: InputOffsets, table: RequestTable, kv_heads: int,
                 windows: Sequence[int | None]) -> None:
        self.offsets = offsets
        self._inputs = inputs
        self._table = table
        self._kv_heads = kv_heads
        self._windows = windows
        self._size = offsets.shape.rows
        self._real = [0, 0]  # number of rows that are not padding, per buffer
        self._pair = pair = PinnedPair(offsets.end + UPDATE_BYTES, inputs.cuda)
        self._arrays = [pair.arrays(buffer, offsets) for buffer in range(2)]
        self._result_row = [pair.array(buffer, offsets.result_row, 1) for buffer in range(2)]
        self._work = [[pair.array(buffer, place, offsets.work_size) for place in offsets.work] for buffer in range(2)]
        self._updates = [pair.array(buffer, offsets.work[-1], offsets.work_size + UPDATE_BYTES // 4)
                         for buffer in range(2)]
        nothing = ItemArrays.of((), np.empty(0, dtype=np.int64))
        for arrays in self._arrays:
            write_step(arrays, nothing, table)
            arrays.sample_rows[:] = np.arange(self._size)

    def send(self, items: ItemArrays, result_row: int, updates: npt.NDArray[np.int32] | None) -> int | None:
        """Write and send a step. `result_row`: the row of the results that its tokens go to; `updates`: block table
        updates of at most UPDATE_BYTES to send with it. Returns the byte offset of the updates, None without any."""
        buffer, count = self._inputs.buffer, len(items.items)
        arrays = self._arrays[buffer]
        if self._real[buffer] > count:  # rows that held requests in this buffer's last step become padding
            write_padding(arrays, slice(count, self._real[buffer]), self._table)
        self._real[buffer] = count
        self._result_row[buffer][0] = result_row
        write_decodes(arrays, items, self._table)
        end, place = self._write_work(buffer), None
        if updates is not None:
            place = -(-end // 16) * 16  # the alignment of every array
            first = (place - self.offsets.work[-1]) // 4
            self._updates[buffer][first:first + len(updates)] = updates
            end = place + 4 * len(updates)
        self._inputs.send(self._pair, end)
        return place

    def _write_work(self, buffer: int) -> int:
        """Cut attention into pieces; return the byte offset at which the inputs end."""
        arrays, end = self._arrays[buffer], 0
        slots, seq_lens = arrays.slots, arrays.seq_lens
        for place, window, into in zip(self.offsets.work, self._windows, self._work[buffer], strict=True):
            numbers: Sequence[int] | npt.NDArray[np.int32]
            if self._size <= FEW:
                numbers = ordered_splits.few_decode_splits(slots.tolist(), seq_lens.tolist(), self._kv_heads, window)
            else:
                numbers = ordered_splits.decode_splits(np.arange(self._size), slots.astype(np.int64),
                                                       seq_lens.astype(np.int64), self._kv_heads, window).ravel()
            into[0] = len(numbers) // ordered_splits.FIELDS
            into[HEADER:HEADER + len(numbers)] = numbers
            end = place + 4 * (HEADER + len(numbers))
        return end
