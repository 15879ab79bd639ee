"""Records what runs in some steps: kernels on a CUDA device, or native kernels and torch operations on a CPU; and
optionally writes a trace that Perfetto opens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from spillover.errors import SpilloverError
from spillover.kernels import native

PREFIX = "spill::"  # prefix of the names of native kernels that run on a CPU


@dataclass(frozen=True)
class Event:
    """One kernel or call, in microseconds."""

    name: str
    start: float
    end: float


@dataclass
class Recording:
    """The result of `recorded`, filled in when its context ends."""

    events: list[Event] = field(default_factory=list)  # in the order of their start
    trace: Path | None = None


@contextlib.contextmanager
def recorded(device: str, trace: Path | None = None, events: bool = True) -> Iterator[Recording]:
    """Record what runs inside on any thread. `trace`: the file to write a trace to; its folders are created.
    `events=False`: only write the trace, which takes a third of the time.

    On a CPU every native kernel is called separately while recording, so that products and attention are distinct.
    """
    recording = Recording(trace=trace)
    if trace is not None:
        try:
            trace.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpilloverError(f"cannot write a trace to '{trace.parent}': {error.strerror}") from error
    cuda = device == "cuda"
    activities = [ProfilerActivity.CUDA] if cuda else []
    if trace is not None or not cuda:  # on CUDA, recording the host's calls slows the host down
        activities.append(ProfilerActivity.CPU)
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with contextlib.ExitStack() as stack:
        if not cuda:
            stack.enter_context(native.traced(lambda kernel: record_function(PREFIX + kernel)))
        running = stack.enter_context(profile(activities=activities, experimental_config=threads))
        yield recording
        if cuda:
            torch.cuda.synchronize()
    if trace is not None:
        running.export_chrome_trace(str(trace))
    if events:
        listed = running.events()
        found = _device_events(listed) if cuda else _host_events(listed)
        recording.events = sorted(found, key=lambda event: event.start)


def _device_events(events: Iterable[FunctionEvent]) -> list[Event]:
    return [Event(each.name, each.time_range.start, each.time_range.end) for each in events
            if each.device_type == DeviceType.CUDA]


def _host_events(events: Iterable[FunctionEvent]) -> list[Event]:
    """Return the calls of native kernels, and the torch operations outside of them on the same threads."""
    listed = list(events)
    threads = {each.thread for each in listed if each.name.startswith(PREFIX)}
    top = [each for each in listed if each.thread in threads and each.cpu_parent is None]
    return [Event(each.name.removeprefix(PREFIX), each.time_range.start, each.time_range.end) for each in top]
