"""A fleet in simulated time: replicas that compute prompts one after another and keep blocks in an LRU cache."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spillover.cluster.fleet import Fleet, Keys, Prompt
from spillover.cluster.mirror import IndexState
from spillover.cluster.policy import POLICIES
from spillover.cluster.replica import Flight, ReplicaReport
from spillover.memory.kv.event_wire import GPU

BLOCK = 16


@dataclass(frozen=True)
class Arrival:
    time: float
    keys: tuple[int, ...]
    output_tokens: int = 0
    session: str | None = None

    @property
    def tokens(self) -> int:
        return len(self.keys) * BLOCK + 1


@dataclass
class Outcome:
    first_token: list[float] = field(default_factory=list)  # seconds from each arrival to its first token
    finished: float = 0.0
    hits: int = 0  # blocks found in caches
    blocks: int = 0
    served: list[int] = field(default_factory=list)  # requests per replica
    chosen: list[int] = field(default_factory=list)  # replica of each arrival

    @property
    def mean(self) -> float:
        return sum(self.first_token) / len(self.first_token)

    @property
    def hit_rate(self) -> float:
        return self.hits / self.blocks


class _Events:
    """A source of exact events, which need none: the simulated cache updates the index directly."""

    state = IndexState.EXACT

    def reset(self) -> None: ...

    def computed(self, keys: Sequence[int]) -> None: ...

    def answered(self, found: bool) -> None: ...


class _Server:
    """One replica: a queue, a cache and a time per prompt token."""

    def __init__(self, fleet: Fleet, place: int, capacity: int, token_seconds: float) -> None:
        self.waiting: deque[tuple[int, Arrival, Flight]] = deque()
        self.computing = False
        self.token_seconds = token_seconds
        self._fleet = fleet
        self._replica = place
        self._capacity = capacity
        self._cache: OrderedDict[int, None] = OrderedDict()

    def find(self, keys: Sequence[int]) -> int:
        found = sum(1 for _ in itertools.takewhile(self._cache.__contains__, keys))
        for key in reversed(keys[:found]):
            self._cache.move_to_end(key)
        return found

    def keep(self, keys: Sequence[int]) -> None:
        new = [key for key in keys if key not in self._cache]
        for key in reversed(keys):
            self._cache[key] = None
            self._cache.move_to_end(key)
        self._fleet.prefix_index.store(self._replica, GPU, new)
        while len(self._cache) > self._capacity:
            self._fleet.prefix_index.remove(self._replica, GPU, (self._cache.popitem(last=False)[0],))
        self._fleet.replicas[self._replica].update(ReplicaReport(self.token_seconds, device_blocks=self._capacity,
                                                    device_blocks_used=len(self._cache)))


def make_fleet(policy: str, replicas: int, exact: bool = True) -> Fleet:
    fleet = Fleet(POLICIES[policy]())
    for place in range(replicas):
        replica = fleet.add(f"replica-{place}", "space")
        replica.ready = True
        if exact:
            fleet.follow(replica, "space", _Events())  # type: ignore[arg-type]
    return fleet


def simulate(policy: str, arrivals: Sequence[Arrival], replicas: int = 4, capacity: int = 1 << 30,
             token_seconds: float | Sequence[float] = 1e-4, decode_seconds: float = 0.0) -> Outcome:
    """Simulate the arrivals; `decode_seconds`: time per output token."""
    fleet = make_fleet(policy, replicas)
    speeds = [token_seconds] * replicas if isinstance(token_seconds, float) else token_seconds
    servers = [_Server(fleet, place, capacity, speed) for place, speed in enumerate(speeds)]
    outcome = Outcome([0.0] * len(arrivals), served=[0] * replicas, chosen=[0] * len(arrivals))
    clock: list[tuple[float, int, Callable[[float], None]]] = []
    order = itertools.count()

    def at(time: float, do: Callable[[float], None]) -> None:
        heapq.heappush(clock, (time, next(order), do))

    def compute(server: _Server, now: float) -> None:
        if server.computing or not server.waiting:
            return
        server.computing = True
        index, arrival, flight = server.waiting.popleft()
        found = min(server.find(arrival.keys), (arrival.tokens - 1) // BLOCK)
        outcome.hits += found
        outcome.blocks += len(arrival.keys)
        at(now + (arrival.tokens - found * BLOCK) * server.token_seconds,
           lambda now: computed(server, index, arrival, flight, now))

    def computed(server: _Server, index: int, arrival: Arrival, flight: Flight, now: float) -> None:
        server.computing = False
        server.keep(arrival.keys)
        fleet.begin(flight, now)
        outcome.first_token[index] = now - arrival.time
        outcome.finished = max(outcome.finished, now + arrival.output_tokens * decode_seconds)
        at(now + arrival.output_tokens * decode_seconds,
           lambda now: fleet.end(flight, now, arrival.output_tokens or 1))
        compute(server, now)

    def arrive(index: int, arrival: Arrival, now: float) -> None:
        prompt = Prompt(arrival.tokens, {"space": Keys(arrival.keys, BLOCK)}, arrival.session)
        decision = fleet.decide(prompt, now)
        assert decision is not None
        fleet.count(prompt, decision)
        place = decision.replica.index
        outcome.served[place] += 1
        outcome.chosen[index] = place
        servers[place].waiting.append((index, arrival, fleet.send(prompt, decision, now)))
        compute(servers[place], now)

    for index, arrival in enumerate(arrivals):
        at(arrival.time, lambda now, index=index, arrival=arrival: arrive(index, arrival, now))  # type: ignore[misc]
    while clock:
        now, _, do = heapq.heappop(clock)
        do(now)
    return outcome


def ceiling(arrivals: Sequence[Arrival]) -> float:
    """Return the hit rate, in blocks, of an unlimited cache shared by all requests."""
    seen: set[int] = set()
    found = total = 0
    for arrival in arrivals:
        found += sum(key in seen for key in arrival.keys)
        total += len(arrival.keys)
        seen.update(arrival.keys)
    return found / total
