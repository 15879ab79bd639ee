"""Where the time of a step goes: on the device by parts of the step, and on the host by parts of the engine's loop.

The same requests run twice: once normally, with clocks around the loop's calls, and once recorded. Times of a kind of
step are means over the middle half of its steps by duration, so that outliers do not count.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spillover.engine.loop import Engine
from spillover.engine.profiling.host_clock import HOST_PARTS, HostStep, host_clock
from spillover.engine.profiling.profile import Event, recorded
from spillover.engine.profiling.step_parts import ORDER, step_parts
from spillover.errors import SpilloverError

IDLE = "idle"
PREFILL, DECODE = "prefill", "decode"
_FIRST = {"cuda": re.compile("_copy_inputs"), "cpu": re.compile("embedding")}  # names with which every step begins
_COPY = re.compile("memcpy|memset", re.IGNORECASE)  # copies, which run on other engines concurrently with kernels


@dataclass(frozen=True)
class Part:
    kernels: float  # mean number of kernels launched per step
    seconds: float


@dataclass(frozen=True)
class PhaseProfile:
    """The mean step of one kind. Parts, including IDLE, add up to `profiled`."""

    steps: int  # number of steps that the mean is over
    batches: tuple[tuple[tuple[int, int], ...], ...]  # per step: (new tokens, tokens cached before) of each request
    parts: dict[str, Part]  # parts on the device in the order of a step; IDLE is the last
    profiled: float  # seconds of a step while recording
    total_seconds: float  # seconds of a step without recording
    host: dict[str, float]  # seconds on the host without recording, by HOST_PARTS
    slowest: tuple[tuple[str, str, float, float], ...]  # (kernel, part, launches, seconds) per step, the slowest first

    @property
    def num_tokens(self) -> float:
        return sum(new for batch in self.batches for new, _ in batch) / self.steps


@dataclass(frozen=True)
class DeviceStep:
    """The kernels of one step."""

    names: tuple[str, ...]
    parts: tuple[str, ...]
    seconds: tuple[float, ...]  # seconds of each not covered by an earlier kernel; of a copy, not by any kernel
    total_seconds: float  # seconds since the end of the previous step

    @property
    def idle(self) -> float:
        return max(0.0, self.total_seconds - sum(self.seconds))


def profile_steps(engine: Engine, device: str, run: Callable[[], object], warm_up: Callable[[], object],
                  trace: Path | None = None) -> dict[str, PhaseProfile]:
    """Profile the steps of `run`; return a profile each for PREFILL and DECODE. `warm_up` runs first while recording,
    because the first kernels under a profiler are slow."""
    with host_clock(engine) as usual:
        run()
    with host_clock(engine) as counted, recorded(device, trace) as recording:
        warm_up()
        first = len(counted)
        run()
    events = device_steps(recording.events, device)
    if len(events) != len(counted):
        raise SpilloverError(f"the profiler has kernels of {len(events)} steps where {len(counted)} ran; try again "
                             "with fewer tokens (--output-len)")
    found = {}
    for phase in (PREFILL, DECODE):
        timed, steps = _chosen(usual, phase), _chosen(counted[first:], phase)
        if timed and steps:
            found[phase] = _mean([usual[place] for place in timed],
                                 [(counted[first + place], events[first + place]) for place in steps])
    return found


def device_steps(events: Sequence[Event], device: str) -> list[DeviceStep]:
    """Divide the device's events, sorted by start, into steps; events before the first step are dropped."""
    begins = [place for place, event in enumerate(events) if _FIRST[device].search(event.name)]
    bounds = [*begins, len(events)]
    steps, reached = [], None
    for begin, end in itertools.pairwise(bounds):
        listed = events[begin:end]
        reached = listed[0].start if reached is None else reached
        last = max(event.end for event in listed)
        seconds = _uncovered(listed, reached)
        parts = step_parts([event.name for event in listed])
        steps.append(DeviceStep(tuple(event.name for event in listed), tuple(parts), tuple(seconds),
                                max(0.0, last - reached) / 1e6))
        reached = max(reached, last)
    return steps


def _uncovered(events: Sequence[Event], reached: float) -> list[float]:
    """Return the seconds of each event, sorted by start, that no earlier one covers; kernels precede copies."""
    seconds = [0.0] * len(events)
    busy: list[tuple[float, float]] = []  # disjoint intervals in which kernels run, ascending
    for place, event in enumerate(events):
        if not _COPY.search(event.name):
            start = max(event.start, reached)
            seconds[place] = max(0.0, event.end - start) / 1e6
            if event.end > start:
                busy.append((start, event.end))
                reached = event.end
    copied = events[0].start if events else 0.0
    for place, event in enumerate(events):
        if _COPY.search(event.name):
            start = max(event.start, copied)
            inside = sum(max(0.0, min(end, event.end) - max(begin, start)) for begin, end in busy)
            seconds[place] = max(0.0, event.end - start - inside) / 1e6
            copied = max(copied, event.end)
    return seconds


def _chosen(steps: Sequence[HostStep], phase: str) -> list[int]:
    """Return the indices of the steps of one kind with at least 90% of the tokens of its largest step, which excludes
    the ends of prompts and of a batch."""
    some = [place for place, step in enumerate(steps) if step.has_prefill == (phase == PREFILL)]
    most = max((steps[place].num_tokens for place in some), default=0)
    return [place for place in some if 10 * steps[place].num_tokens >= 9 * most]


def _middle(values: Sequence[float]) -> list[int]:
    """Return the indices of the values in the middle half."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    cut = len(values) // 4
    return order[cut:len(values) - cut]


def _mean(timed: Sequence[HostStep], steps: Sequence[tuple[HostStep, DeviceStep]]) -> PhaseProfile:
    usual = [timed[place] for place in _middle([step.total_seconds for step in timed])]
    kept = [steps[place] for place in _middle([step.total_seconds for _, step in steps])]
    count = len(kept)
    launches: dict[tuple[str, str], int] = {}
    seconds: dict[tuple[str, str], float] = {}
    for _, step in kept:
        for name, part, spent in zip(step.names, step.parts, step.seconds, strict=True):
            launches[name, part] = launches.get((name, part), 0) + 1
            seconds[name, part] = seconds.get((name, part), 0.0) + spent
    parts = {part: Part(sum(many for key, many in launches.items() if key[1] == part) / count,
                        sum(spent for key, spent in seconds.items() if key[1] == part) / count)
             for part in ORDER if any(key[1] == part for key in launches)}
    parts[IDLE] = Part(0, sum(step.idle for _, step in kept) / count)
    slowest = sorted(seconds, key=lambda key: -seconds[key])
    return PhaseProfile(
        steps=count, batches=tuple(step.batch for step, _ in kept), parts=parts,
        profiled=sum(part.seconds for part in parts.values()),
        total_seconds=sum(step.total_seconds for step in usual) / len(usual),
        host={part: sum(step.seconds.get(part, 0.0) for step in usual) / len(usual) for part in HOST_PARTS},
        slowest=tuple((*key, launches[key] / count, seconds[key] / count) for key in slowest),
    )
