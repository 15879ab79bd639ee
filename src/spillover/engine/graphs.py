"""CUDA graphs of decode steps, one for each of a ladder of batch sizes: a step is then one launch, not hundreds.

A graph is recorded the first time its size is met, right after that step has run without one, which also compiles
whatever it needs. All graphs share one memory pool, since only one of them runs at a time. What differs between steps
of one size lies in device memory; numbers the host bakes into a launch are part of the key.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spillover.units import format_bytes

log = logging.getLogger("spillover.engine")

Key = tuple[int, bool]  # rows, and whether their tokens are drawn in the graph


def ladder(most: int) -> list[int]:
    """1, 2, 4, 8, 16, then in steps of 8 up to 256, of 32 beyond; `most` ends it."""
    sizes = [1, 2, 4, 8, *range(16, 257, 8), *range(288, most + 1, 32)]
    return [size for size in sizes if size < most] + [most]


@dataclass(frozen=True)
class GraphStats:
    """What recording has cost so far."""

    graphs: int = 0
    seconds: float = 0.0
    nbytes: int = 0  # device memory that the graphs hold

    def __str__(self) -> str:
        return f"{self.graphs} CUDA graphs so far, {self.seconds:.2f} s, {format_bytes(self.nbytes)}"


@dataclass(frozen=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor | None  # what the step returned; kept only where somebody reads it


class Graphs:
    def __init__(self, device: torch.device, max_num_seqs: int) -> None:
        self._sizes = ladder(max_num_seqs)
        self._device = device
        self._recorded: dict[Key, _Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self.stats = GraphStats()

    @property
    def sizes(self) -> list[int]:
        return list(self._sizes)

    def size(self, rows: int) -> int:
        """The smallest recorded size that takes so many rows."""
        return self._sizes[bisect.bisect_left(self._sizes, rows)]

    def run(self, key: Key, step: Callable[[], Tensor]) -> Tensor | None:
        """The step of this key, from its graph if there is one. Its result, unless the tokens are drawn already."""
        recorded = self._recorded.get(key)
        if recorded is None:
            hidden = step()
            self._recorded[key] = self._record(key, step)
            return None if key[1] else hidden
        recorded.graph.replay()
        return recorded.hidden

    def clear(self) -> None:
        self._recorded.clear()
        self._pool = torch.cuda.graph_pool_handle()  # the old one ends with the last graph in it

    def _record(self, key: Key, step: Callable[[], Tensor]) -> _Recorded:
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
        log.info("recorded the decode step of %d rows; %s", key[0], self.stats)
        return _Recorded(graph, None if key[1] else hidden)
