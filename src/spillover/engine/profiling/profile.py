"""Where the time of some steps goes: a trace that Perfetto opens, and shares by kind of work.

On a CUDA device the kinds are told by kernel names, and idle is when none of them runs. On a CPU each native kernel
is called by itself for the occasion, so that attention and products can be told apart, and idle is when the step's
thread runs none of them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from spillover.errors import SpilloverError
from spillover.kernels import native

PREFIX = "spill::"  # begins the names of what is recorded on a CPU

# The first that matches a kernel's name.
KINDS = (
    ("copies", re.compile(r"memcpy|_bring|update_tables|fill_tokens", re.IGNORECASE)),
    ("attention", re.compile(r"attention|store_kv|flash|fmha", re.IGNORECASE)),
    ("MoE", re.compile(r"expert|_route|_sort\b|_combine|moe", re.IGNORECASE)),
    ("sampling", re.compile(r"sampling|^_(peaks|sums|pick)\b|argmax|topk|radix|scan|softmax", re.IGNORECASE)),
    ("GEMM", re.compile(r"gemm|gemv|linear|cutlass|cublas|nvjet|splitk|wgmma|^sm\d", re.IGNORECASE)),
    ("norm", re.compile(r"norm|rope", re.IGNORECASE)),
)
OTHER, IDLE = "other", "idle"


@dataclass
class Breakdown:
    """Seconds by kind; all of them, idle included, add up to the whole."""

    seconds: dict[str, float] = field(default_factory=dict)
    whole: float = 0.0
    kernels: dict[str, tuple[str, int, float]] = field(default_factory=dict)  # name: kind, calls, seconds
    trace: Path | None = None

    def share(self, kind: str) -> float:
        return self.seconds.get(kind, 0.0) / self.whole if self.whole else 0.0

    def slowest(self, count: int) -> list[tuple[str, str, int, float]]:
        """Return (name, kind, calls, seconds), the largest first."""
        rows = [(name, *values) for name, values in self.kernels.items()]
        return sorted(rows, key=lambda row: -row[3])[:count]


@contextlib.contextmanager
def profiled(folder: Path, name: str, device: str, add_up: bool = True) -> Iterator[Breakdown]:
    """Profile what runs inside; the breakdown is filled in at the end and the trace lies at folder/name.json.gz.
    `add_up=False`: the trace alone, in a third of the time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpilloverError(f"cannot write a trace to '{folder}': {error.strerror}") from error
    breakdown = Breakdown(trace=folder / f"{name}.json.gz")
    cuda = device == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with contextlib.ExitStack() as stack:
        if not cuda:
            stack.enter_context(native.traced(lambda kernel: record_function(PREFIX + kernel)))
        running = stack.enter_context(profile(activities=activities, experimental_config=threads))
        yield breakdown
        if cuda:
            torch.cuda.synchronize()
    running.export_chrome_trace(str(breakdown.trace))
    if add_up:
        _add_up(breakdown, _device_events(running.events()) if cuda else _host_events(running.events()))


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if pattern.search(name)), OTHER)


@dataclass(frozen=True)
class _Event:
    name: str
    start: float  # microseconds
    end: float


def _device_events(events: Iterable[FunctionEvent]) -> list[_Event]:
    return [_Event(each.name, each.time_range.start, each.time_range.end) for each in events
            if each.device_type == DeviceType.CUDA]


def _host_events(events: Iterable[FunctionEvent]) -> list[_Event]:
    """Return calls recorded here, and torch's own operations outside of them on the same threads."""
    listed = list(events)
    threads = {each.thread for each in listed if each.name.startswith(PREFIX)}
    top = [each for each in listed if each.thread in threads and each.cpu_parent is None]
    return [_Event(each.name.removeprefix(PREFIX), each.time_range.start, each.time_range.end) for each in top]


def _add_up(breakdown: Breakdown, events: list[_Event]) -> None:
    """Add up events; where they overlap, the time counts once, for the earlier one."""
    if not events:
        return
    events.sort(key=lambda event: event.start)
    reached = events[0].start
    busy = 0.0
    for event in events:
        seconds = max(0.0, event.end - max(event.start, reached)) / 1e6
        reached = max(reached, event.end)
        kind = kind_of(event.name)
        breakdown.seconds[kind] = breakdown.seconds.get(kind, 0.0) + seconds
        _, calls, total = breakdown.kernels.get(event.name, (kind, 0, 0.0))
        breakdown.kernels[event.name] = (kind, calls + 1, total + seconds)
        busy += seconds
    breakdown.whole = (reached - events[0].start) / 1e6
    breakdown.seconds[IDLE] = max(0.0, breakdown.whole - busy)
