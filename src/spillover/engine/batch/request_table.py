"""A runner's table of requests and their state.

Each request has a slot: a row of the block tables on the device, and of the arrays that a batch is gathered from.
Steps contain the new requests, the ids of ended ones, and the new entries of the block tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from spillover.engine.batch.sampler import seed_stream, temperature_only
from spillover.engine.requests.token_ids import TokenIds
from spillover.engine.step import DraftItem, NewRequest, Step, StepResult
from spillover.plan.workspace import max_samples


@dataclass(frozen=True)
class StepLimits:
    """The limits of a step, from the plan."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    captured_rows: int = 0  # CUDA: rows of the largest prefill step captured as a graph; 0: none is
    draft_tokens: int = 0  # maximum draft tokens per request
    simulated: tuple[float, ...] = ()  # simulated share of drafts accepted up to each position; (): drafts are verified

    @property
    def max_samples(self) -> int:
        """Return the maximum number of tokens sampled in a step."""
        return max_samples(self.max_num_seqs, self.max_num_batched_tokens, self.draft_tokens)

    def request_table(self, groups: int, block_size: int, device: torch.device) -> RequestTable:
        return RequestTable(self.max_num_seqs, groups, -(-self.max_model_len // block_size) + 1, device, self.simulated)


@dataclass(slots=True)
class Row:
    request: NewRequest
    slot: int
    token_ids: TokenIds  # tokens that the host knows


class BlockUpdates(NamedTuple):
    """New entries of the block tables: indices into the flattened tables, and the blocks to write there."""

    places: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int32]


NO_UPDATES = BlockUpdates(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32))


class RequestTable:
    def __init__(self, count: int, groups: int, width: int, device: torch.device,
                 simulated: tuple[float, ...] = ()) -> None:
        """Make `count` slots, and one with an empty block table for padding. `width`: blocks of the longest sequence.
        `simulated`: the share of drafts that count as accepted up to each position; (): drafts are verified."""
        self.simulated = simulated
        self.padding = count
        self.block_tables = torch.zeros(groups, count + 1, width, dtype=torch.int32, device=device)
        self.num_prompt = np.zeros(count, dtype=np.int64)
        self.num_known = np.zeros(count, dtype=np.int64)  # number of tokens that the host knows
        self.draw = np.full(count, -1, dtype=np.int32)  # the request's row among the last step's samples; -1: none
        self.plain = np.zeros(count, dtype=bool)  # whether the request samples by temperature alone
        self.temperature = np.zeros(count, dtype=np.float32)  # 0: greedy
        self.stream = np.zeros(count, dtype=np.uint64)  # start of the request's stream of random numbers
        self.tracks_rows = False  # whether first_row and end_row are kept, for a head that drafts
        self.first_row = np.zeros(count, dtype=np.int64)  # first position that the request's last step computed
        self.end_row = np.zeros(count, dtype=np.int64)  # end of the positions that the request's last step computed
        # Drafts that only the device knows: by request id, indices into the samples and drafts of the last step.
        self.drafted: dict[int, list[int]] = {}
        self._rows: dict[int, Row] = {}
        self._free = list(range(count - 1, -1, -1))
        self._group_stride = (count + 1) * width
        self._width = width

    def __getitem__(self, id: int) -> Row:
        return self._rows[id]

    def begin(self, step: Step) -> tuple[npt.NDArray[np.int64], BlockUpdates]:
        """Add the step's new requests and remove ended ones; return its items' slots and the table entries to write."""
        for id in step.ended:
            self._free.append(self._rows.pop(id).slot)
        for request in step.new:
            self._add(request)
        slots: list[int] = []
        firsts: list[int] = []  # start of each run of new entries in the flat tables, minus its start in `new`
        counts: list[int] = []  # length of each run
        new: list[int] = []
        for item in step.items:
            slot = self._rows[item.id].slot
            slots.append(slot)
            for group, blocks in enumerate(item.new_blocks):
                if blocks:
                    firsts.append(group * self._group_stride + slot * self._width + item.first_block - len(new))
                    counts.append(len(blocks))
                    new.extend(blocks)
        if not new:
            return np.array(slots, dtype=np.int64), NO_UPDATES
        places = np.arange(len(new)) + np.repeat(np.array(firsts, dtype=np.int64), counts)
        return np.array(slots, dtype=np.int64), BlockUpdates(places, np.array(new, dtype=np.int32))

    def set_draws(self, slots: npt.NDArray[np.int64], drawn: npt.NDArray[np.int64]) -> None:
        """Record where a step's sampled tokens will be: row i of its samples belongs to slot drawn[i]."""
        if drawn is not slots:
            self.draw[slots] = -1
        self.draw[drawn] = np.arange(len(drawn), dtype=np.int32)

    def follows(self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return, for each slot, whether its request's last step is known to have computed the position before."""
        return (self.first_row[slots] < positions) & (positions <= self.end_row[slots])

    def set_rows(self, slots: npt.NDArray[np.int64], starts: npt.NDArray[np.int64],
                 counts: npt.NDArray[np.int64]) -> None:
        """Record which rows of its requests a step computes, if they are tracked."""
        if not self.tracks_rows:
            return
        self.first_row[slots] = starts
        self.end_row[slots] = starts + counts

    def begin_drafts(self, items: Sequence[DraftItem]) -> tuple[list[int], npt.NDArray[np.int64], BlockUpdates]:
        """Return the indices of the items that can be drafted for, as their last step computed the position before,
        with their slots and the table entries to write."""
        rows = [self._rows.get(item.id) for item in items]
        found = [index for index, (item, row) in enumerate(zip(items, rows, strict=True))
                 if row is not None and self.first_row[row.slot] < item.start <= self.end_row[row.slot]]
        slots = np.array([row.slot for index in found if (row := rows[index]) is not None], dtype=np.int64)
        counts = [len(items[index].blocks) for index in found]
        blocks = np.array([block for index in found for block in items[index].blocks], dtype=np.int32)
        firsts = slots * self._width + np.array([items[index].first_block for index in found], dtype=np.int64)
        ends = np.cumsum(counts, dtype=np.int64)
        places = np.arange(len(blocks)) + np.repeat(firsts - ends + counts, counts)
        return found, slots, BlockUpdates(places, blocks)

    def end(self, step: Step, result: StepResult) -> None:
        """Append the tokens that a step sampled to its requests."""
        for item, tokens in zip(step.items, result.token_ids, strict=True):
            if tokens:
                row = self._rows[item.id]
                row.token_ids.extend(tokens)
                self.num_known[row.slot] += len(tokens)

    def _add(self, request: NewRequest) -> None:
        slot, params = self._free.pop(), request.params
        self._rows[request.id] = Row(request, slot, request.token_ids[:])
        self.num_prompt[slot] = request.num_prompt
        self.num_known[slot] = len(request.token_ids)
        self.draw[slot] = -1
        self.first_row[slot] = self.end_row[slot] = 0
        self.plain[slot] = temperature_only(params) and not request.masked
        self.temperature[slot] = 0.0 if params.greedy else params.temperature
        self.stream[slot] = seed_stream(request.seed)
