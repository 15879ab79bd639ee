"""One replica in simulated time: continuous batching with chunked prefill, by the engine's rules.

Follows `engine/scheduler.py` and `engine/loop.py`: decodes first, then begun prompts, then new ones in order of
arrival, all under one token budget; with overlap a step is scheduled when the one before it begins; a leaving request
keeps its blocks until the steps launched with it have completed; without free blocks the latest request is preempted.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from spillover.cluster.simulate.block_cache import BlockCache, Held
from spillover.cluster.simulate.costs import StepCosts, StepLoad
from spillover.memory.spill.restore_plan import ComputeCost

WATERMARK = 0.01  # share of the blocks that admission leaves free, as in the engine


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


@dataclass(eq=False)
class SimulatedRequest:
    """A request at one replica."""

    number: int  # index of its arrival
    prompt: int  # number of prompt tokens
    limit: int  # number of answer tokens at which it finishes at this replica
    keys: list[int] = field(default_factory=list)  # keys of its full blocks; those of its answer are appended
    received: bool = False  # its prompt's KV was sent by another replica, with the first token of the answer
    known: int = 0  # number of tokens, including those that launched steps will sample
    computed: int = 0
    generated: int = 0  # number of sampled answer tokens
    pending: int = 0
    in_flight: int = 0  # number of launched steps that it is in
    status: Status = Status.WAITING
    restoring: bool = False
    admitted: bool = False
    device_tokens: int = 0  # prompt tokens found on the device when it was first admitted, ...
    host_tokens: int = 0  # ... and in host memory
    held: Held = field(default_factory=Held)

    def __post_init__(self) -> None:
        self.known = self.prompt + self.received
        self.generated = int(self.received)


@dataclass(slots=True)
class Item:
    sequence: SimulatedRequest
    count: int  # number of tokens computed
    end: int  # number of the sequence's tokens computed after the step
    samples: bool


@dataclass(frozen=True)
class SimulatedStep:
    items: tuple[Item, ...]
    load: StepLoad
    seconds: float


@dataclass(frozen=True)
class ReplicaSettings:
    """The limits of one replica, with the engine's names."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_blocks: int = 1 << 30
    host_blocks: int = 0
    host_block_seconds: float = 0.0  # time to copy a block back from host memory
    overlap: bool = True  # --async-scheduling


class SimulatedReplica:
    def __init__(self, settings: ReplicaSettings, costs: StepCosts, cache: BlockCache,
                 at: Callable[[float, Callable[[float], None]], None],
                 on_step: Callable[[SimulatedReplica, SimulatedStep, float], None]) -> None:
        """Create an idle replica. `at` schedules a callback at a time; `on_step` is called for every completed step,
        after its results have been counted."""
        self.settings = settings
        self.costs = costs
        self.cache = cache
        most = settings.max_num_batched_tokens
        whole = costs.seconds(StepLoad(most, most * most / 2))
        self.cost = ComputeCost(whole / most)  # the engine's estimate of its own speed, here after warm-up
        self.waiting: deque[SimulatedRequest] = deque()
        self.running: list[SimulatedRequest] = []
        self.steps = 0
        self.busy_seconds = 0.0
        self.preemptions = 0
        self._at = at
        self._on_step = on_step
        self._leaving: set[SimulatedRequest] = set()
        self._current: SimulatedStep | None = None
        self._next: SimulatedStep | None = None
        self._answers = itertools.count(-1, -1)  # keys for blocks of answers
        self._link_free = 0.0  # time when the link from host memory becomes free
        self._watermark = int(WATERMARK * cache.capacity)

    def add(self, sequence: SimulatedRequest, now: float) -> None:
        self.waiting.append(sequence)
        self._start(now)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self._leaving or self._current)

    # Time

    def _start(self, now: float) -> None:
        if self._current is None:
            self._run(self._schedule(now), now)

    def _run(self, step: SimulatedStep | None, now: float) -> None:
        self._current = step
        if step is not None:
            self._at(now + step.seconds, self._ended)
            self._next = self._schedule(now) if self.settings.overlap else None

    def _ended(self, now: float) -> None:
        step, following = self._current, self._next
        assert step is not None
        self._next = None
        self.steps += 1
        self.busy_seconds += step.seconds
        self.cost.observe(step.load.prefill_tokens, step.load.prefill_tokens + step.load.decode_rows, step.seconds)
        self._finish(step)
        self._on_step(self, step, now)
        self._run(following if following is not None else self._schedule(now), now)

    # Scheduling

    def _schedule(self, now: float) -> SimulatedStep | None:
        items: list[Item] = []
        budget = self.settings.max_num_batched_tokens
        order = [each for each in self.running if not each.restoring]
        decodes = [each for each in order if each.known - each.computed == 1]
        prefills = [each for each in order if each.known - each.computed > 1]
        for each in decodes + prefills:
            if each.status is not Status.RUNNING or not budget or each.known - each.prompt >= each.limit:
                continue
            count = min(each.known - each.computed, budget)
            if self._allocate(each, each.computed + count, items):
                items.append(_take(each, count))
                budget -= count
        self._admit(items, budget, now)
        if not items:
            return None
        load = _load(items)
        return SimulatedStep(tuple(items), load, self.costs.seconds(load))

    def _allocate(self, sequence: SimulatedRequest, tokens: int, items: list[Item]) -> bool:
        missing = self._missing(sequence, tokens)
        while missing > 0 and not self.cache.allocate(sequence.held, missing):
            if self._leaving:  # leaving requests are about to free their blocks
                return False
            taken = {item.sequence for item in items}
            victim = next(each for each in reversed(self.running) if each not in taken and not each.restoring)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: SimulatedRequest) -> None:
        self.preemptions += 1
        victim.status = Status.PREEMPTED
        self.running.remove(victim)
        self._leave_when_idle(victim)

    def _admit(self, items: list[Item], budget: int, now: float) -> None:
        outstanding = sum(max(0, self._missing(each, each.known)) for each in self.running)
        while self.waiting and budget and len(self.running) + len(self._leaving) < self.settings.max_num_seqs:
            sequence, size = self.waiting[0], self.settings.block_size
            most = min(len(sequence.keys), (sequence.known - 1) // size)
            device, host = self.cache.match(sequence.keys, most)
            if host and self.settings.host_block_seconds >= size * (self.cost.token_seconds or 0.0):
                host = 0  # computing the blocks is faster
            self.cache.hold(sequence.held, sequence.keys[:device])
            missing = self._missing(sequence, sequence.known)
            if missing + outstanding + (self._watermark if self.running else 0) > self.cache.available:
                self.cache.release(sequence.held)
                return
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.status, sequence.computed = Status.RUNNING, device * size
            if sequence.received and not sequence.admitted:  # a later admission recomputes what was preempted
                self._receive(sequence)
            elif host:
                self._restore(sequence, device, host, now)
            if not sequence.admitted:
                sequence.admitted = True
                sequence.device_tokens, sequence.host_tokens = device * size, host * size
            if not sequence.restoring and sequence.known - sequence.prompt < sequence.limit:
                count = min(sequence.known - sequence.computed, budget)
                fits = self.cache.allocate(sequence.held, max(0, self._missing(sequence, sequence.computed + count)))
                assert fits
                items.append(_take(sequence, count))
                budget -= count
            outstanding += max(0, self._missing(sequence, sequence.known))

    def _receive(self, sequence: SimulatedRequest) -> None:
        """Allocate the blocks of a prompt whose KV was sent by another replica."""
        fits = self.cache.allocate(sequence.held, self._missing(sequence, sequence.prompt))
        assert fits
        self._publish(sequence, sequence.prompt)
        sequence.computed = sequence.prompt

    def _restore(self, sequence: SimulatedRequest, device: int, host: int, now: float) -> None:
        """Copy blocks from host memory; until that has completed, the sequence is not computed."""
        fits = self.cache.allocate(sequence.held, host)
        assert fits
        sequence.restoring = True
        self._link_free = max(self._link_free, now) + host * self.settings.host_block_seconds

        def restored(now: float) -> None:
            sequence.restoring = False
            sequence.computed = (device + host) * self.settings.block_size
            self._publish(sequence, sequence.computed)
            self._start(now)

        self._at(self._link_free, restored)

    # Results and leaving

    def _finish(self, step: SimulatedStep) -> None:
        for item in step.items:
            sequence = item.sequence
            sequence.in_flight -= 1
            self._publish(sequence, item.end)
            if item.samples:
                sequence.pending -= 1
                sequence.generated += 1
                if sequence.generated >= sequence.limit:
                    if sequence.status is Status.RUNNING:
                        self.running.remove(sequence)
                    sequence.status = Status.FINISHED
                    self._leave_when_idle(sequence)
            if not sequence.in_flight and sequence in self._leaving:
                self._leave(sequence)

    def _publish(self, sequence: SimulatedRequest, tokens: int) -> None:
        known, full = len(sequence.held.shared), tokens // self.settings.block_size
        if known < full:
            while len(sequence.keys) < full:  # blocks of the answer, which no prompt of a trace contains
                sequence.keys.append(next(self._answers))
            self.cache.publish(sequence.held, sequence.keys[known:full])

    def _leave_when_idle(self, sequence: SimulatedRequest) -> None:
        if sequence.in_flight:
            self._leaving.add(sequence)
        else:
            self._leave(sequence)

    def _leave(self, sequence: SimulatedRequest) -> None:
        self._leaving.discard(sequence)
        self.cache.release(sequence.held)
        if sequence.status is Status.PREEMPTED:
            sequence.status, sequence.computed = Status.WAITING, 0
            self.waiting.appendleft(sequence)

    def _missing(self, sequence: SimulatedRequest, tokens: int) -> int:
        held = sequence.held
        return -(-tokens // self.settings.block_size) - (len(held.shared) + held.private - held.duplicates)


def _take(sequence: SimulatedRequest, count: int) -> Item:
    sequence.computed += count
    samples = sequence.computed == sequence.known
    sequence.in_flight += 1
    sequence.pending += samples
    sequence.known += samples
    return Item(sequence, count, sequence.computed, samples)


def _load(items: Sequence[Item]) -> StepLoad:
    prefill = rows = context = 0
    pairs = 0.0
    for item in items:
        if item.count == 1 and item.samples:
            rows += 1
            context += item.end
        else:
            prefill += item.count
            pairs += item.count * (item.end - item.count / 2)
    return StepLoad(prefill, pairs, rows, context)
