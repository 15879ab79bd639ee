"""The requests that a runner has been told of, and what it knows of each.

Each has a slot: a row of the block tables, which lie on the device, and of arrays that a whole batch is gathered from.
Steps say which requests are new and which have ended, and which entries of the block tables are new.
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
    """The most of a step, from the plan."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    captured_rows: int = 0  # CUDA: largest prefill step captured as a graph; 0 disables
    draft_tokens: int = 0  # of one request
    simulated: tuple[float, ...] = ()  # drafts are accepted up to each position in this share of cases; (): truly

    @property
    def max_samples(self) -> int:
        """Return the most tokens that are sampled in a step."""
        return max_samples(self.max_num_seqs, self.max_num_batched_tokens, self.draft_tokens)

    def request_table(self, groups: int, block_size: int, device: torch.device) -> RequestTable:
        return RequestTable(self.max_num_seqs, groups, -(-self.max_model_len // block_size) + 1, device, self.simulated)


@dataclass(slots=True)
class Row:
    request: NewRequest
    slot: int
    token_ids: TokenIds  # as far as the host knows them


class BlockUpdates(NamedTuple):
    """Entries of the block tables that are new: places in the flat tables, and the blocks that go there."""

    places: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int32]


_NO_UPDATES = BlockUpdates(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32))


class RequestTable:
    def __init__(self, count: int, groups: int, width: int, device: torch.device,
                 simulated: tuple[float, ...] = ()) -> None:
        """Make the slots. `width`: blocks of the longest sequence. One slot more has an empty table: for padding.
        `simulated`: how often drafts count as accepted up to each position; (): only those that are right."""
        self.simulated = simulated
        self.padding = count
        self.block_tables = torch.zeros(groups, count + 1, width, dtype=torch.int32, device=device)
        self.num_prompt = np.zeros(count, dtype=np.int64)
        self.num_known = np.zeros(count, dtype=np.int64)  # tokens that the host knows
        self.draw = np.full(count, -1, dtype=np.int32)  # the request's row among those sampled in the last step
        self.plain = np.zeros(count, dtype=bool)  # sampled by temperature alone
        self.temperature = np.zeros(count, dtype=np.float32)  # 0: greedy
        self.stream = np.zeros(count, dtype=np.uint64)  # where the request's random numbers begin
        self.tracks_rows = False  # for a head that drafts: rows [first, end) of each request's last step
        self.first_row = np.zeros(count, dtype=np.int64)
        self.end_row = np.zeros(count, dtype=np.int64)
        # Where the last drafts lie that only the device knows: rows of the last step's samples, by request.
        self.drafted: dict[int, npt.NDArray[np.int32]] = {}
        self._rows: dict[int, Row] = {}
        self._free = list(range(count - 1, -1, -1))
        self._group_stride = (count + 1) * width
        self._width = width

    def __getitem__(self, id: int) -> Row:
        return self._rows[id]

    def begin(self, step: Step) -> tuple[npt.NDArray[np.int64], BlockUpdates]:
        """Take in what a step says of requests; returns its items' slots, and the entries to write."""
        for id in step.ended:
            self._free.append(self._rows.pop(id).slot)
        for request in step.new:
            self._add(request)
        slots: list[int] = []
        firsts: list[int] = []  # where each run of new entries begins, and how long it is
        counts: list[int] = []
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
            return np.array(slots, dtype=np.int64), _NO_UPDATES
        places = np.arange(len(new)) + np.repeat(np.array(firsts, dtype=np.int64), counts)
        return np.array(slots, dtype=np.int64), BlockUpdates(places, np.array(new, dtype=np.int32))

    def set_draws(self, slots: npt.NDArray[np.int64], drawn: npt.NDArray[np.int64]) -> None:
        """Note where the next tokens of a step's requests will be: in row i of its samples, that of slot drawn[i]."""
        if drawn is not slots:
            self.draw[slots] = -1
        self.draw[drawn] = np.arange(len(drawn), dtype=np.int32)

    def follows(self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return whether the position before each was computed in the last step of its request, as far as is noted."""
        return (self.first_row[slots] < positions) & (positions <= self.end_row[slots])

    def set_rows(self, slots: npt.NDArray[np.int64], starts: npt.NDArray[np.int64],
                 counts: npt.NDArray[np.int64]) -> None:
        """Note which rows of its requests a step computes, if anybody asks for that."""
        if not self.tracks_rows:
            return
        self.first_row[slots] = starts
        self.end_row[slots] = starts + counts

    def begin_drafts(self, items: Sequence[DraftItem]) -> tuple[list[int], npt.NDArray[np.int64], BlockUpdates]:
        """Return the items that can be drafted for, those whose last step computed the position before, with their
        slots and the entries to write."""
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
        """Take in the tokens that a step sampled."""
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
