"""The inputs of steps that only decode, of one size: most of them never change, and a step writes what does.

What the host does between two steps is done with a cold cache, as a step takes the device long: it is worth few calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from spillover.engine.batch import ScheduledRequest
from spillover.engine.sampler import random_numbers
from spillover.engine.slots import Slots
from spillover.engine.step_inputs import Places, StepInputs
from spillover.kernels.triton.pieces import FIELDS, decode_items, few_decode_items, most_items

FEW = 16  # rows whose attention is cut without arrays
UPDATES = 1 << 15  # bytes that there is room for behind a step's own inputs

i32, i64, f32, f64 = torch.int32, torch.int64, torch.float32, torch.float64


class DecodeForm:
    def __init__(self, inputs: StepInputs, places: Places, slots: Slots, kv_heads: int, windows: Sequence[int | None],
                 longest: int, tiled: bool) -> None:
        """Of a step of padding alone, which was put into the inputs just now. `tiled`: attention is cut into tiles
        whatever its rows, and has no items."""
        size = self._size = places.rows
        self.places = places
        self._inputs = inputs
        self._slots = slots
        self._kv_heads = kv_heads
        self._windows = windows
        self._tiled = tiled
        self._real = [0, 0]  # rows that are no padding, in either buffer
        self._form = form = inputs.keep(UPDATES)
        self._turn = form.arrays(places.turn, i32, 1)
        self._token_ids = form.arrays(places.token_ids, i64, size)
        self._positions = form.arrays(places.positions, i64, size)
        self._uniform = form.arrays(places.uniform, f64, size)
        self._sources = form.arrays(places.sources, i32, size)
        self._seq_lens = form.arrays(places.seq_lens, i32, size)
        self._slot_of = form.arrays(places.slots, i32, size)
        self._temperature = form.arrays(places.temperature, f32, size)
        for rows in form.arrays(places.sample_rows, i64, size):
            rows[:] = np.arange(size)
        room = 4 + FIELDS * most_items(size, longest)
        self._items = [form.arrays(place, i32, room) for place in places.items]
        self._updates = form.arrays(places.items[-1], i32, room + UPDATES // 4)

    def send(self, items: Sequence[ScheduledRequest], slots: npt.NDArray[np.int64], starts: npt.NDArray[np.int64],
             turn: int, updates: npt.NDArray[np.int32] | None) -> int | None:
        """`slots` and `starts`: of each item; `turn`: the row of the results that its token goes to; `updates`: what
        is sent with it, no more than UPDATES bytes. Returns where that lies."""
        buffer, count = self._inputs.turn, len(items)
        self._pad(buffer, count)
        self._turn[buffer][0] = turn
        self._positions[buffer][:count] = starts
        self._seq_lens[buffer][:count] = starts + 1
        self._slot_of[buffer][:count] = slots
        temperature = self._slots.temperature[slots]
        self._temperature[buffer][:count] = temperature
        if temperature.any():
            steps = np.array([item.step for item in items], dtype=np.uint64)
            self._uniform[buffer][:count] = random_numbers(self._slots.stream[slots], steps)
        sources = self._sources[buffer]
        sources[:count] = self._slots.draw[slots]
        for row, item in enumerate(items):
            if not item.pending:
                self._token_ids[buffer][row] = item.request.token_ids[item.start]
                sources[row] = -1
        end, place = self._write_items(buffer), None
        if updates is not None:
            place = -(-end // 16) * 16  # as every array lies
            first = (place - self.places.items[-1]) // 4
            self._updates[buffer][first:first + len(updates)] = updates
            end = place + 4 * len(updates)
        self._inputs.send(self._form, end)
        return place

    def _pad(self, buffer: int, count: int) -> None:
        """Rows that were a request's the last time, and are none now."""
        gone = slice(count, self._real[buffer])
        if self._real[buffer] > count:
            self._positions[buffer][gone] = 0
            self._seq_lens[buffer][gone] = 1
            self._slot_of[buffer][gone] = self._slots.padding
            self._temperature[buffer][gone] = 0
            self._token_ids[buffer][gone] = 0
            self._sources[buffer][gone] = -1
        self._real[buffer] = count

    def _write_items(self, buffer: int) -> int:
        """Returns where the inputs end."""
        slots, seq_lens, end = self._slot_of[buffer], self._seq_lens[buffer], 0
        for place, window, into in zip(self.places.items, self._windows, self._items, strict=True):
            numbers: Sequence[int] | npt.NDArray[np.int32] = ()
            if not self._tiled and self._size <= FEW:
                numbers = few_decode_items(slots.tolist(), seq_lens.tolist(), self._kv_heads, window)
            elif not self._tiled:
                numbers = decode_items(np.arange(self._size), slots.astype(np.int64), seq_lens.astype(np.int64),
                                       self._kv_heads, window).ravel()
            into[buffer][0] = len(numbers) // FIELDS
            into[buffer][4:4 + len(numbers)] = numbers
            end = place + 4 * (4 + len(numbers))
        return end
