"""CUDA graphs of steps, one for each size of a ladder: a step is then one launch, not hundreds.

The first step of a size runs without a graph, which also compiles the kernels it needs, and is captured right after.
Two kinds are captured when their size occurs for the second time: steps with prefill (not those that only verify
drafts), which have many sizes, and steps that move weights, whose addresses may soon change. All graphs share one
memory pool, since only one of them runs at a time. Values that differ between steps of one size are in device memory;
numbers that the host passes to a launch by value are part of the key.
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
    draws: bool  # whether sampling is part of the captured graph
    prompts: bool = False  # whether requests may have several rows: prefill or draft tokens to verify
    graph_version: int = 0  # version of the addresses of moving weights; graphs of earlier versions are dropped
    drafts: bool = False  # whether this is a drafting pass of a head, not a step


def prompt_ladder(most: int, drafts: bool = False) -> list[int]:
    """Return sizes 16 apart, from 256 on 32 and from 512 on 64 apart, up to `most`, none if it is 0: at most an eighth
    of many rows is padding. `drafts` adds smaller sizes, for steps that verify the drafts of one or two requests."""
    sizes = [*range(16, 256, 16), *range(256, 512, 32), *range(512, most, 64)]
    if drafts:
        sizes = [2, 3, 4, 5, 6, 8, 10, 12, *sizes]
    return [size for size in sizes if size < most] + [most] * (most > 0)


def ladder(most: int) -> list[int]:
    """Return the sizes 1, 2, 4, 8, 16, then 8 apart up to 256 and 32 apart beyond; the last size is `most`."""
    sizes = [1, 2, 4, 8, *range(16, 257, 8), *range(288, most + 1, 32)]
    return [size for size in sizes if size < most] + [most]


@dataclass(frozen=True)
class GraphStats:
    """The cost of capturing so far."""

    graphs: int = 0
    seconds: float = 0.0
    nbytes: int = 0  # bytes of device memory that the graphs hold

    def __str__(self) -> str:
        return f"{self.graphs} CUDA graphs so far, {self.seconds:.2f} s, {format_bytes(self.nbytes)}"


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor | None  # the step's result; None if sampling is captured too, as it is then not read


class Graphs:
    def __init__(self, device: torch.device, max_num_seqs: int, prompt_rows: int, drafts: bool = False) -> None:
        """Start without graphs. `prompt_rows`: rows of the largest captured prefill step, 0 for none; `drafts`: whether
        steps verify drafts."""
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
        """Return the smallest size that is at least `rows`."""
        return self._sizes[bisect.bisect_left(self._sizes, rows)]

    @property
    def prompt_sizes(self) -> list[int]:
        return list(self._prompt_sizes)

    def prompt_size(self, rows: int) -> int | None:
        """Return the smallest prefill size that is at least `rows`; None if such a step is not captured."""
        index = bisect.bisect_left(self._prompt_sizes, rows)
        return self._prompt_sizes[index] if index < len(self._prompt_sizes) else None

    def run(self, key: Key, step: Callable[[], Tensor], at_once: bool = False) -> Tensor | None:
        """Run the step of this key, from its graph if there is one; return its result, or None if the key includes
        sampling. `at_once`: capture it now, whatever its kind."""
        captured = self._captured.get(key)
        if captured is None:
            hidden = step()
            if at_once or not (key.prompts > key.draws or key.graph_version) or key in self._met:
                self._captured[key] = self._capture(key, step)
                # Old graphs are dropped only after the capture: the pool is freed together with its last graph.
                self._captured = {each: graph for each, graph in self._captured.items()
                                  if _is_good(each, key.graph_version)}
            self._met = {each for each in self._met if _is_good(each, key.graph_version)} | {key}
            return None if key.draws else hidden
        captured.graph.replay()
        return captured.hidden

    def clear(self) -> None:
        self._captured.clear()
        self._pool = torch.cuda.graph_pool_handle()  # the old pool was freed together with its last graph

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
    """Return whether the weights are still where they were when this graph was captured; version 0 drops no graph."""
    return not graph_version or key.graph_version in (0, graph_version)
