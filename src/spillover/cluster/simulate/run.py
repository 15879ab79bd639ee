"""Runs arrivals through a fleet in simulated time; the router's real code decides (`cluster/fleet.py`)."""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spillover.cluster.fleet import Fleet, Keys, Prompt
from spillover.cluster.mirror import IndexState, Mirror
from spillover.cluster.policy import POLICIES
from spillover.cluster.replica import Flight, ReplicaReport
from spillover.cluster.simulate.arrivals import Arrival
from spillover.cluster.simulate.batching import ReplicaSettings, SimulatedReplica, SimulatedRequest, SimulatedStep
from spillover.cluster.simulate.block_cache import BlockCache
from spillover.cluster.simulate.costs import StepCosts
from spillover.memory.kv.event_wire import CPU

SPACE = "simulated"
REPORT_SECONDS = 1.0  # interval of a replica's reports to the router, as in `cluster/watch.py`


@dataclass(frozen=True)
class FleetSettings:
    """The fleet to simulate."""

    replicas: int = 1  # number of replicas that compute prompts, and also decode unless others do
    decode_replicas: int = 0  # number of replicas that only decode; 0 for no disaggregation
    policy: str = "predicted"
    kv_events: bool = True  # the router knows exactly what each replica holds; otherwise it guesses
    replica: ReplicaSettings = field(default_factory=ReplicaSettings)
    request_seconds: float = 0.0  # time of a request before its replica's queue: HTTP, tokenising
    router_seconds: float = 0.0  # time of a request in the router
    transfer_token_seconds: float = 0.0  # time to send a token's KV from a prefill to a decode replica


@dataclass
class Outcome:
    settings: FleetSettings
    first_token: array[float]  # seconds from arrival, by request; nan if refused
    finished: array[float]  # time on the trace's clock, by request; nan if refused
    gaps: array[float] = field(default_factory=lambda: array("d"))  # between two tokens of an answer, of all requests
    refused: int = 0  # requests longer than a replica's blocks
    prompt_tokens: int = 0  # prompt tokens of requests that were not refused
    device_tokens: int = 0  # prompt tokens found on a device
    host_tokens: int = 0  # prompt tokens found in host memory
    output_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    busy_seconds: list[float] = field(default_factory=list)  # by replica, decode replicas last
    served: list[int] = field(default_factory=list)  # number of requests by replica that computed the prompt
    seconds: float = 0.0  # from the first arrival to the last token


def simulate(arrivals: Sequence[Arrival], settings: FleetSettings, costs: StepCosts,
             on_step: Callable[[SimulatedReplica, SimulatedStep, float], None] | None = None) -> Outcome:
    """Simulate arrivals, which are in order of time. `on_step` is called for every step."""
    return _Simulation(arrivals, settings, costs, on_step).run()


class _IndexListener:
    """A listener that updates the router's index with a replica's blocks, at once and without loss."""

    def __init__(self, fleet: Fleet, index: int) -> None:
        self._index, self._replica = fleet.prefix_index, index

    def store(self, medium: str, keys: Sequence[int]) -> None:
        self._index.store(self._replica, medium, keys)

    def remove(self, medium: str, keys: Sequence[int]) -> None:
        self._index.remove(self._replica, medium, keys)


@dataclass
class _Open:
    """A request that has not finished."""

    flight: Flight
    replica: int  # index of the replica that computes the prompt
    last: float = 0.0  # time of the latest token
    target: int = -1  # index of the decode replica; -1 if not chosen
    sent: int = 0  # number of tokens whose KV the target has or is being sent


class _Simulation:
    def __init__(self, arrivals: Sequence[Arrival], settings: FleetSettings, costs: StepCosts,
                 on_step: Callable[[SimulatedReplica, SimulatedStep, float], None] | None) -> None:
        self.arrivals = arrivals
        self.settings = settings
        self._on_step = on_step
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self.fleet = Fleet(POLICIES[settings.policy]())
        self.servers: list[SimulatedReplica] = []
        self.decoders: list[SimulatedReplica] = []
        for index in range(settings.replicas):
            replica = self.fleet.add(f"replica-{index}", SPACE)
            replica.ready = True
            if settings.kv_events:
                mirror = Mirror(self.fleet.prefix_index, index)
                mirror.state = IndexState.EXACT
                self.fleet.follow(replica, SPACE, mirror)
            listener = _IndexListener(self.fleet, index) if settings.kv_events else None
            self.servers.append(self._server(costs, BlockCache(settings.replica.num_blocks,
                                                               settings.replica.host_blocks, listener)))
        for _ in range(settings.decode_replicas):
            self.decoders.append(self._server(costs, BlockCache(settings.replica.num_blocks,
                                                                settings.replica.host_blocks)))
        self._decoding = [0] * settings.decode_replicas  # number of open requests of each
        self._link_free = [0.0] * settings.replicas
        self._open: dict[int, _Open] = {}
        self._reported_at = -REPORT_SECONDS
        nothing = [float("nan")] * len(arrivals)
        self.outcome = Outcome(settings, array("d", nothing), array("d", nothing), served=[0] * settings.replicas)

    def run(self) -> Outcome:
        coming = iter(enumerate(self.arrivals))
        following = next(coming, None)
        outcome = self.outcome
        while following is not None or self._events:
            if following is not None and (not self._events or following[1].at <= self._events[0][0]):
                self._arrive(*following)
                following = next(coming, None)
                continue
            now, _, do = heapq.heappop(self._events)
            do(now)
        assert not self._open
        assert all(server.idle for server in (*self.servers, *self.decoders))
        ends = [each for each in outcome.finished if each == each]
        outcome.seconds = max(ends) - self.arrivals[0].at if ends else 0.0
        for server in (*self.servers, *self.decoders):
            outcome.steps += server.steps
            outcome.preemptions += server.preemptions
            outcome.busy_seconds.append(server.busy_seconds)
        return outcome

    def _server(self, costs: StepCosts, cache: BlockCache) -> SimulatedReplica:
        return SimulatedReplica(self.settings.replica, costs, cache, self._at, self._stepped)

    def _at(self, time: float, do: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), do))

    # The path of a request

    def _arrive(self, number: int, arrival: Arrival) -> None:
        size, outcome = self.settings.replica.block_size, self.outcome
        if -(-(arrival.tokens + arrival.output_tokens) // size) > self.settings.replica.num_blocks:
            outcome.refused += 1
            return
        now = arrival.at
        self._report(now)
        prompt = Prompt(arrival.tokens, {SPACE: Keys(arrival.keys, size)}, output_tokens=arrival.output_tokens)
        decision = self.fleet.decide(prompt, now)
        assert decision is not None
        self.fleet.count(prompt, decision)
        index = decision.replica.index
        outcome.served[index] += 1
        outcome.prompt_tokens += arrival.tokens
        self._open[number] = _Open(self.fleet.send(prompt, decision, now), index)
        sequence = SimulatedRequest(number, arrival.tokens, 1 if self.decoders else arrival.output_tokens,
                                    list(arrival.keys))
        self._at(now + self.settings.router_seconds + self.settings.request_seconds,
                 lambda now: self.servers[index].add(sequence, now))

    def _report(self, now: float) -> None:
        """Report the replicas' state to the router, as often as a router requests it."""
        if now - self._reported_at < REPORT_SECONDS:
            return
        self._reported_at = now
        settings = self.settings.replica
        tiers = {CPU: settings.host_block_seconds} if settings.host_blocks else {}
        for replica, server in zip(self.fleet.replicas, self.servers, strict=True):
            replica.update(ReplicaReport(server.cost.token_seconds, tiers, settings.max_num_seqs, settings.num_blocks,
                                         server.cache.used))

    def _stepped(self, server: SimulatedReplica, step: SimulatedStep, now: float) -> None:
        for item in step.items:
            if self.decoders and not item.sequence.received:
                self._send(item.sequence, item.end, now)
            if item.samples:
                self._token(item.sequence, now)
        if self._on_step is not None:
            self._on_step(server, step, now)

    def _token(self, sequence: SimulatedRequest, now: float) -> None:
        number, outcome = sequence.number, self.outcome
        opened, arrival = self._open[number], self.arrivals[number]
        outcome.output_tokens += 1
        if opened.flight.first_token is None:
            outcome.first_token[number] = now - arrival.at
            outcome.device_tokens += sequence.device_tokens
            outcome.host_tokens += sequence.host_tokens
            self.fleet.begin(opened.flight, now)
        else:
            outcome.gaps.append(now - opened.last)
        opened.last = now
        ended = sequence.generated >= arrival.output_tokens
        if sequence.generated >= sequence.limit and not sequence.received:
            self.fleet.end(opened.flight, now, sequence.limit, sequence.device_tokens + sequence.host_tokens)
        if ended:
            if sequence.received:
                self._decoding[opened.target] -= 1
            outcome.finished[number] = now
            del self._open[number]
        elif self.decoders and not sequence.received:
            self._hand_over(sequence, arrival)

    # Disaggregation

    def _send(self, sequence: SimulatedRequest, end: int, now: float) -> None:
        """Send the KV that a step computed to the decode replica, while the rest of the prompt is computed."""
        opened, arrival = self._open[sequence.number], self.arrivals[sequence.number]
        if arrival.output_tokens == 1:
            return
        if opened.target < 0:
            opened.target = min(range(len(self.decoders)), key=lambda index: (self._decoding[index], index))
            self._decoding[opened.target] += 1
            size = self.settings.replica.block_size
            opened.sent = self.decoders[opened.target].cache.match(arrival.keys, (arrival.tokens - 1) // size)[0] * size
        new = max(0, end - opened.sent)
        opened.sent = max(opened.sent, end)
        self._link_free[opened.replica] = (max(self._link_free[opened.replica], now)
                                         + new * self.settings.transfer_token_seconds)

    def _hand_over(self, sequence: SimulatedRequest, arrival: Arrival) -> None:
        """Move the request to its decode replica as soon as the last of the prompt's KV has arrived."""
        opened = self._open[sequence.number]
        received = SimulatedRequest(sequence.number, arrival.tokens, arrival.output_tokens, list(arrival.keys), True)
        self._at(max(self._link_free[opened.replica], opened.last),
                 lambda now: self.decoders[opened.target].add(received, now))
