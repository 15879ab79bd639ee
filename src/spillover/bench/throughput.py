"""Offline throughput: all requests at once, timed until the last finishes; vLLM's flags, console lines, JSON keys.

A repeat never uses a prompt that an earlier one has left in the prefix cache (see `ServeWorkload`), and the warm-up has
prompts of its own, so that the model is measured and not the cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

from spillover.bench.bounds import Achieved, achieved, workload_bound
from spillover.bench.serving.serve_request import ServeWorkload
from spillover.bench.statistics import Interval, median_interval
from spillover.bench.target import SOURCES, BenchRequest, Counters, Generates
from spillover.bench.workloads.workloads import WARMUP

WARMUP_REQUESTS = 4
WARMUP_OUTPUT = 8


@dataclass(frozen=True)
class Run:
    """The result of one repeat."""

    elapsed: float
    requests: tuple[BenchRequest, ...]
    output_tokens: int
    cached: tuple[int, ...]  # number of prompt tokens of each request that came from a cache
    sources: dict[str, int]
    counters: Counters
    rss: int  # resident bytes of this process at the end of the repeat, with the target still loaded

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def output_rate(self) -> float:
        return self.output_tokens / self.elapsed

    def as_dict(self) -> dict[str, Any]:
        return {"elapsed_time": self.elapsed, "output_tokens": self.output_tokens, "tokens_by_source": self.sources,
                "steps": self.counters.steps, "preemptions": self.counters.preemptions, "rss_bytes": self.rss}


@dataclass(frozen=True)
class Setting:
    """One row of a sweep: the displayed values of the options that vary, and a factory for the target."""

    coordinates: dict[str, str]
    make: Callable[[], Generates]


@dataclass(frozen=True)
class ThroughputResult:
    coordinates: dict[str, str]
    runs: tuple[Run, ...]
    limit: Achieved | None
    planned_bytes: int | None

    @property
    def typical(self) -> Run:
        """Return the repeat with the median time (the upper one if their number is even)."""
        return sorted(self.runs, key=lambda run: run.elapsed)[len(self.runs) // 2]

    @property
    def output_rate(self) -> Interval:
        return median_interval([run.output_rate for run in self.runs])

    @property
    def waste(self) -> float | None:
        counters = self.typical.counters
        return counters.slots_wasted / counters.slots_held if counters.slots_held else None

    @property
    def occupancy(self) -> float | None:
        """Return the mean number of requests that sampled a token in a step."""
        run = self.typical
        return run.output_tokens / run.counters.steps if run.counters.steps else None

    def as_dict(self) -> dict[str, Any]:
        run, counters = self.typical, self.typical.counters
        total = run.prompt_tokens + run.output_tokens
        return {
            "setting": self.coordinates,
            # keys that vLLM writes too
            "elapsed_time": run.elapsed,
            "num_requests": len(run.requests),
            "total_num_tokens": total,
            "requests_per_second": len(run.requests) / run.elapsed,
            "tokens_per_second": total / run.elapsed,
            # keys of our own
            "output_tokens_per_second": run.output_rate,
            "output_tokens_per_second_interval": self.output_rate.as_dict(),
            "total_prompt_tokens": run.prompt_tokens,
            "total_output_tokens": run.output_tokens,
            "tokens_by_source": run.sources,
            "steps": counters.steps,
            "mean_batch": self.occupancy,
            "preemptions": counters.preemptions,
            "num_blocks": counters.num_blocks,
            "block_size": counters.block_size,
            "mean_slots_held": counters.slots_held / counters.steps if counters.steps else None,
            "mean_slots_wasted": counters.slots_wasted / counters.steps if counters.steps else None,
            "waste_percent": None if self.waste is None else 100 * self.waste,
            "rss_bytes": run.rss,
            "planned_bytes": self.planned_bytes,
            "roofline": None if self.limit is None else self.limit.as_dict(),
            "repeats": [one.as_dict() for one in self.runs],
        }


def measure(setting: Setting, workload: ServeWorkload, num_iters: int = 1, progress: bool = False,
            compiles: bool = False) -> ThroughputResult:
    """Measure a setting's repeats. `compiles`: the target compiles or captures each shape on first use."""
    target = setting.make()
    try:
        warm_up(target, workload, whole=compiles)
        runs = tuple(run_once(target, offline(workload, repeat), progress) for repeat in range(num_iters))
        result = ThroughputResult(setting.coordinates, runs, None, target.planned_bytes)
        if target.limits is None:
            return result
        run = result.typical
        bound = workload_bound(target.limits, run.requests, run.cached, target.max_num_seqs)
        return replace(result, limit=achieved(run.elapsed, bound, target.limits))
    finally:
        target.close()
        del target
        release_memory()


def warm_up(target: Generates, workload: ServeWorkload, whole: bool = False) -> None:
    """Incur first-use costs (kernels, allocators, thread pools) on prompts that are not used again. `whole`: run a
    full-size iteration, so that every shape of a step has occurred."""
    requests = offline(workload, WARMUP)
    if whole:
        target.generate(requests)
        return
    requests = requests[:WARMUP_REQUESTS]
    target.generate([BenchRequest(request.prompt_token_ids, min(request.output_len, WARMUP_OUTPUT))
                     for request in requests])


def offline(workload: ServeWorkload, repeat: int) -> list[BenchRequest]:
    """Return the requests of a repeat as token ids, to send all at once."""
    requests = []
    for request in workload.requests(repeat):
        assert isinstance(request.prompt, tuple)
        requests.append(BenchRequest(request.prompt, request.output_len))
    return requests


def release_memory() -> None:
    """Return freed memory to the system, so that it is not counted in the next setting of a sweep."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # C libraries other than glibc have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def run_once(target: Generates, requests: Sequence[BenchRequest], progress: bool) -> Run:
    target.reset_prefix_cache()
    before = target.counters()
    start = time.perf_counter()
    completions = target.generate(requests, progress=progress)
    elapsed = time.perf_counter() - start
    sources = {source: sum(done.sources.get(source, 0) for done in completions) for source in SOURCES}
    cached = tuple(done.cached for done in completions)
    return Run(elapsed, tuple(requests), sum(done.output_tokens for done in completions), cached, sources,
               target.counters().since(before), psutil.Process().memory_info().rss)
