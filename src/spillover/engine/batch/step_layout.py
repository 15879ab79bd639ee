"""Writes a step into the arrays that kernels read: for the CPU, for CUDA, and for a template of decode steps.

The caller provides the arrays: in new memory, in pinned memory, or in a template whose constant parts are already
written. Arrays that are larger than the step end with padding: rows of separate requests whose KV is in the dummy
block.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spillover.engine.batch.request_table import RequestTable
from spillover.engine.batch.sampler import random_numbers
from spillover.engine.step import Phase, StepItem

Integers = npt.NDArray[np.int64]

_KNOWN = array("i", [-1])  # the source of a token that the host knows


@dataclass(frozen=True)
class ItemArrays:
    """A step's items as arrays of shape [number of items]."""

    items: Sequence[StepItem]
    slots: Integers
    starts: Integers
    counts: Integers
    samples: Integers
    num_rows: int
    num_samples: int
    only_decodes: bool

    @staticmethod
    def of(items: Sequence[StepItem], slots: Integers) -> ItemArrays:
        n = len(items)
        if all(item.phase is Phase.DECODE for item in items):
            ones = _decode_constants(n).ones
            return ItemArrays(items, slots, np.array([item.start for item in items], dtype=np.int64), ones, ones, n, n,
                              True)
        starts, counts, samples = np.array([(item.start, item.count, item.num_samples) for item in items],
                                           dtype=np.int64).T
        return ItemArrays(items, slots, starts, counts, samples, int(counts.sum()), int(samples.sum()), False)


@dataclass(frozen=True)
class SampleRows:
    """The rows that tokens are sampled from, as arrays of shape [number of samples]."""

    rows: Integers  # rows of the step that are sampled from
    slots: Integers
    output_index: Integers  # index of the sampled token among the request's output tokens

    @staticmethod
    def of(items: ItemArrays, table: RequestTable) -> SampleRows:
        counts = items.samples
        owners = np.repeat(np.arange(len(counts)), counts)
        offsets = np.arange(len(owners)) - np.repeat(np.cumsum(counts), counts)  # relative to an item's end: negative
        ends = np.cumsum(items.counts)
        slots = items.slots[owners]
        output_index = (items.starts + items.counts)[owners] + offsets + 1 - table.num_prompt[slots]
        return SampleRows(ends[owners] + offsets, slots, output_index)


@dataclass(frozen=True)
class StepArrays:
    """The arrays of a step that kernels read: T rows of B requests, R sampled rows, with padding at the end."""

    token_ids: npt.NDArray[np.int64]  # [T]; 0 where only the device knows the token
    # [T], index of a token that only the device knows in the last step's samples and drafts; -1: the host knows it
    sources: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]  # [T]
    row_of: npt.NDArray[np.int32]  # [T], index of the request that the row belongs to
    query_start: npt.NDArray[np.int32]  # [B + 1], index of the first row of each request
    seq_lens: npt.NDArray[np.int32]  # [B], number of tokens in the cache after the step
    slots: npt.NDArray[np.int32]  # [B], indices into the block tables
    follows: npt.NDArray[np.int32]  # [B], 1 if the request's last step computed the position before its first row
    sample_rows: npt.NDArray[np.int64]  # [R], rows of the step that are sampled from
    temperature: npt.NDArray[np.float32]  # [R]
    uniform: npt.NDArray[np.float64]  # [R], random numbers in [0, 1)

    @staticmethod
    def empty(rows: int, requests: int, samples: int) -> StepArrays:
        sizes = {"T": rows, "B": requests, "B+1": requests + 1, "R": samples}
        return StepArrays(**{name: np.empty(sizes[size], dtype) for name, (dtype, size) in ARRAYS.items()})

    @staticmethod
    def decodes(count: int) -> StepArrays:
        """Make the arrays of a step of `count` requests that only decodes, for `write_decodes`."""
        constant = _decode_constants(count)
        return StepArrays(
            token_ids=np.empty(count, np.int64), sources=np.empty(count, np.int32), positions=np.empty(count, np.int64),
            row_of=constant.row_of, query_start=constant.query_start, seq_lens=np.empty(count, np.int32),
            slots=np.empty(count, np.int32), follows=np.empty(count, np.int32), sample_rows=constant.sample_rows,
            temperature=np.empty(count, np.float32), uniform=np.empty(count, np.float64))


# Name -> type and number of elements, in the order of a step's input buffer.
ARRAYS: dict[str, tuple[Any, str]] = {
    "token_ids": (np.int64, "T"), "positions": (np.int64, "T"), "uniform": (np.float64, "R"),
    "sample_rows": (np.int64, "R"), "sources": (np.int32, "T"), "row_of": (np.int32, "T"),
    "query_start": (np.int32, "B+1"), "seq_lens": (np.int32, "B"), "slots": (np.int32, "B"),
    "follows": (np.int32, "B"), "temperature": (np.float32, "R"),
}


class _DecodeConstants(NamedTuple):
    """Arrays that are the same in all decode steps of the same number of requests; read-only."""

    ones: Integers  # number of rows, and of samples, of each item
    row_of: npt.NDArray[np.int32]
    query_start: npt.NDArray[np.int32]
    sample_rows: Integers


@cache
def _decode_constants(count: int) -> _DecodeConstants:
    numbers = np.arange(count + 1, dtype=np.int32)
    return _DecodeConstants(np.ones(count, dtype=np.int64), numbers[:count], numbers, np.arange(count))


def write_step(into: StepArrays, items: ItemArrays, table: RequestTable, padding_rows: int = 1) -> None:
    """Write any step. `padding_rows`: maximum rows of a padding request; the last ones have fewer or none."""
    n, rows, size, total = len(items.slots), items.num_rows, len(into.slots), len(into.token_ids)
    counts, starts = items.counts, items.starts
    if size > n:
        padding = np.clip(total - rows - padding_rows * np.arange(size - n), 0, padding_rows)
        counts, starts = np.concatenate((counts, padding)), np.concatenate((starts, np.zeros_like(padding)))
    into.query_start[0] = 0
    np.cumsum(counts, out=into.query_start[1:])
    into.positions[:] = np.arange(total) + np.repeat(starts - into.query_start[:-1], counts)
    into.row_of[:] = np.repeat(np.arange(size), counts)
    into.seq_lens[:] = starts + counts
    into.slots[:n] = items.slots
    into.slots[n:] = table.padding
    into.follows[:n] = table.follows(items.slots, items.starts)
    into.follows[n:] = 0
    into.token_ids[rows:] = 0
    into.sources[rows:] = -1
    _write_tokens(into, items, table)
    sampled = SampleRows.of(items, table)
    count = len(sampled.rows)
    into.sample_rows[:count] = sampled.rows
    into.sample_rows[count:] = 0
    into.temperature[count:] = 0
    into.uniform[:] = 0
    _write_sampling(into, sampled.slots, sampled.output_index, table)


def write_decodes(into: StepArrays, items: ItemArrays, table: RequestTable) -> None:
    """Write a step that only decodes over one of the same number of rows, leaving the constant arrays unchanged."""
    n, slots, ends = len(items.slots), items.slots, items.starts + 1
    into.positions[:n] = items.starts
    into.seq_lens[:n] = ends
    into.slots[:n] = slots
    if table.tracks_rows:
        into.follows[:n] = table.follows(slots, items.starts)
    _write_tokens(into, items, table)
    _write_sampling(into, slots, ends - table.num_prompt[slots], table)


def write_padding(into: StepArrays, rows: slice, table: RequestTable) -> None:
    """Overwrite rows of a step that only decodes with padding."""
    into.positions[rows] = 0
    into.seq_lens[rows] = 1
    into.slots[rows] = table.padding
    into.follows[rows] = 0
    into.temperature[rows] = 0
    into.token_ids[rows] = 0
    into.sources[rows] = -1


def _write_sampling(into: StepArrays, slots: Integers, output_index: Integers, table: RequestTable) -> None:
    """Write temperatures, and random numbers unless all temperatures are 0, as they are not read then."""
    temperature = table.temperature[slots]
    into.temperature[:len(slots)] = temperature
    if temperature.any():
        into.uniform[:len(slots)] = random_numbers(table.stream[slots], output_index.astype(np.uint64))


def _write_tokens(into: StepArrays, items: ItemArrays, table: RequestTable) -> None:
    """Write the token ids that the host knows, and for the others their index in the last step's samples and drafts."""
    n = len(items.items)
    draws = table.draw[items.slots]
    if items.num_rows == n:
        into.token_ids[:n] = 0
        into.sources[:n] = draws
        for row in (table.num_known[items.slots] > items.starts).nonzero()[0].tolist():
            item = items.items[row]
            into.token_ids[row] = table[item.id].token_ids[item.start]
            into.sources[row] = -1
        return
    pending = items.starts + items.counts > table.num_known[items.slots]  # only an item's last row can be pending
    token_ids, sources = array("i"), array("i")  # arrays, as some items have thousands of rows
    for item, is_pending, drawn in zip(items.items, pending.tolist(), draws.tolist(), strict=True):
        unknown: Sequence[int] = ()  # sources of the last rows, whose tokens only the device knows
        if item.draft_on_device:
            unknown = table.drafted[item.id][:len(item.draft)]
        elif is_pending and not item.draft:
            unknown = (drawn,)
        token_ids += table[item.id].token_ids[item.start:item.end]
        token_ids.extend([0] * len(unknown) if unknown else item.draft)
        sources += _KNOWN * (item.count - len(unknown))
        sources.extend(unknown)
    into.token_ids[:items.num_rows] = np.frombuffer(token_ids, dtype=np.int32)
    into.sources[:items.num_rows] = np.frombuffer(sources, dtype=np.int32)
