"""CUDA graphs of steps, one for each of a ladder of sizes: a step is then one launch, not hundreds.

A step of a size without a graph runs without one, which compiles the kernels it needs too, and is captured right after.
Steps with prefill (not those that only verify drafts), whose sizes are many, and steps that move weights, which may
soon lie elsewhere, are captured when their size comes the second time. All graphs share one memory pool, since only
one of them runs at a time. What differs between steps of one size lies in device memory; numbers the host bakes into a
launch are part of the key.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from spillover.units import format_bytes

log = logging.getLogger("spillover.engine")


class Key(NamedTuple):
    rows: int
    draws: bool  # sampling is part of the captured graph
    prompts: bool = False  # it has prefill
    graph_version: int = 0  # of where weights lie that move; graphs of earlier versions are dropped
    drafts: bool = False  # a pass of a head, and no step


def prompt_ladder(most: int, drafts: bool = False) -> list[int]:
    """Return sizes in steps of 16, of 32 from 256, of 64 from 512: at most an eighth of many rows is padding; `most`
    ends it, and with 0 there are none. With `drafts`, smaller steps too: those that verify the draft of a request or
    two."""
    sizes = [*range(16, 256, 16), *range(256, 512, 32), *range(512, most, 64)]
    if drafts:
        sizes = [2, 3, 4, 5, 6, 8, 10, 12, *sizes]
    return [size for size in sizes if size < most] + [most] * (most > 0)


def ladder(most: int) -> list[int]:
    """Return the sizes 1, 2, 4, 8, 16, then in steps of 8 up to 256, of 32 beyond; `most` ends it."""
    sizes = [1, 2, 4, 8, *range(16, 257, 8), *range(288, most + 1, 32)]
    return [size for size in sizes if size < most] + [most]


@dataclass(frozen=True)
class GraphStats:
    """What capturing has cost so far."""

    graphs: int = 0
    seconds: float = 0.0
    nbytes: int = 0  # device memory that the graphs hold

    def __str__(self) -> str:
        return f"{self.graphs} CUDA graphs so far, {self.seconds:.2f} s, {format_bytes(self.nbytes)}"


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor | None  # what the step returned; kept only where somebody reads it


class Graphs:
    def __init__(self, device: torch.device, max_num_seqs: int, prompt_rows: int, drafts: bool = False) -> None:
        """Make no graph yet. `prompt_rows`: largest prefill step captured; 0 disables. `drafts`: are verified."""
        self._sizes = ladder(max_num_seqs)
        self._prompt_sizes = prompt_ladder(prompt_rows, drafts)
        self._device = device
        self._met: set[Key] = set()
        self._captured: dict[Key, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self.stats = GraphStats()

    @property
    def sizes(self) -> list[int]:
        return list(self._sizes)

    def size(self, rows: int) -> int:
        """Return the smallest size with room for `rows`."""
        return self._sizes[bisect.bisect_left(self._sizes, rows)]

    @property
    def prompt_sizes(self) -> list[int]:
        return list(self._prompt_sizes)

    def prompt_size(self, rows: int) -> int | None:
        """Return the same for prefill steps; None if a step of `rows` is not captured."""
        index = bisect.bisect_left(self._prompt_sizes, rows)
        return self._prompt_sizes[index] if index < len(self._prompt_sizes) else None

    def run(self, key: Key, step: Callable[[], Tensor], at_once: bool = False) -> Tensor | None:
        """Run the step of this key, from its graph if there is one; returns its result, unless it sampled tokens.
        `at_once`: capture it now, whatever its kind."""
        captured = self._captured.get(key)
        if captured is None:
            hidden = step()
            if at_once or not (key.prompts > key.draws or key.graph_version) or key in self._met:
                self._captured[key] = self._capture(key, step)
                # Not sooner: the pool would end with the last graph in it.
                self._captured = {each: graph for each, graph in self._captured.items()
                                  if _is_good(each, key.graph_version)}
            self._met = {each for each in self._met if _is_good(each, key.graph_version)} | {key}
            return None if key.draws else hidden
        captured.graph.replay()
        return captured.hidden

    def clear(self) -> None:
        self._captured.clear()
        self._pool = torch.cuda.graph_pool_handle()  # the old one ends with the last graph in it

    def _capture(self, key: Key, step: Callable[[], Tensor]) -> _Captured:
        start, before = time.perf_counter(), torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            hidden = step()
        finally:
            graph.capture_end()
        grown = torch.cuda.memory_reserved(self._device) - before
        self.stats = GraphStats(self.stats.graphs + 1, self.stats.seconds + time.perf_counter() - start,
                                self.stats.nbytes + grown)
        kind = "draft" if key.drafts else "prompt" if key.prompts else "decode"
        log.info("captured a CUDA graph of the %s step of %d rows; %s", kind, key.rows, self.stats)
        return _Captured(graph, None if key.draws else hidden)


def _is_good(key: Key, graph_version: int) -> bool:
    """Return whether the weights are where they were when this graph was captured; version 0 says nothing."""
    return not graph_version or key.graph_version in (0, graph_version)
