"""All replicas, the blocks they hold, and which replica gets the next request. No I/O and no clock: a router passes the
real time, a simulator its simulated time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from spillover.cluster.index import Match, PrefixIndex
from spillover.cluster.mirror import Approximation, IndexState, Mirror
from spillover.cluster.policy import Candidate, Policy, RequestFacts
from spillover.cluster.predict import Demand, Prediction, equalised_rates, predict
from spillover.cluster.replica import Flight, Replica
from spillover.memory.kv.event_wire import GPU

RUNNING_TOLERANCE = 8  # sequences a replica may decode beyond the least busy one without counting as busier
BUSY_SECONDS = 10.0  # time constant in seconds of the share of time that replicas are busy
REUSE_SMOOTHING = 0.02
ROLE_SECONDS = 1.0  # a replica for prompts decodes only if all others would be later by more than this
MOST_SESSIONS = 65_536
MOST_SEEN = 1 << 17  # blocks in each of two generations, for the share of tokens that could have been cached


@dataclass(frozen=True)
class Keys:
    """The keys of a prompt's blocks in one key space, shared by replicas of one model, type and block size."""

    keys: Sequence[int] = ()
    block_size: int = 16


@dataclass(frozen=True)
class Prompt:
    """The known properties of a request before it is sent to a replica."""

    tokens: int
    keys: Mapping[str, Keys] = field(default_factory=dict)  # by key space; empty if no keys could be derived
    session: str | None = None
    model: str | None = None
    output_tokens: int | None = None  # maximum number of output tokens; None if the request sets none


class Decision(NamedTuple):
    replica: Replica
    prediction: Prediction
    keys: Keys
    first: int  # index of the first block that the replica has to compute
    remote_prefill: bool = False  # another replica computes the blocks, and this one loads them


class Fleet:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.replicas: list[Replica] = []
        self.prefix_index = PrefixIndex()
        self.mirrors: list[Mirror | Approximation] = []
        self.spaces: list[str] = []  # key space of each replica
        self.reusable_tokens = 0  # prompt tokens in blocks that an earlier request had: the most a cache can find
        self.prompt_tokens = 0
        self._sessions: OrderedDict[str, int] = OrderedDict()  # session -> replica, in order of last use
        self._seen, self._seen_before = set[int](), set[int]()  # blocks of prompts: this and the last generation
        self._reuse = 0.0  # recent share of prompt tokens found in caches
        self._work = 0.0  # recently sent work in seconds, decaying
        self._counted = 0.0  # time when `_work` was last updated

    def add(self, name: str, space: str = "text") -> Replica:
        """Add a replica whose blocks are guessed from the requests sent to it."""
        replica = Replica(len(self.replicas), name)
        self.replicas.append(replica)
        self.prefix_index.add(replica.index)
        self.mirrors.append(Approximation(self.prefix_index, replica.index))
        self.spaces.append(space)
        return replica

    def follow(self, replica: Replica, space: str, mirror: Mirror | Approximation) -> None:
        """Set the mirror that tracks the replica's blocks from now on, under keys of this space."""
        self.prefix_index.clear(replica.index)
        self.mirrors[replica.index] = mirror
        self.spaces[replica.index] = space

    def mark_gone(self, replica: Replica, why: str) -> None:
        """Mark a replica as gone, and forget its blocks."""
        replica.ready, replica.why = False, why
        self.mirrors[replica.index].reset()

    def state(self, replica: Replica) -> IndexState:
        return self.mirrors[replica.index].state

    # One request

    def decide(self, prompt: Prompt, now: float, exclude: Collection[Replica] = ()) -> Decision | None:
        """Return the decision which replica gets a request; None if no replica is usable."""
        usable = [replica for replica in self.replicas if replica.usable(now) and replica not in exclude]
        if prompt.model is not None and any(prompt.model in replica.models for replica in usable):
            usable = [replica for replica in usable if prompt.model in replica.models]
        if not usable:
            return None
        session = self._sessions.get(prompt.session) if prompt.session is not None else None
        matches = self._matches(prompt, usable)
        candidates: list[Candidate] = []
        loads = [replica.load(now, self.prefix_index.held(replica.index, GPU)) for replica in usable]
        least = min(load.running for load in loads)
        for replica, rates, load in zip(usable, equalised_rates([each.rates for each in usable]), loads, strict=True):
            keys, match = matches[replica.index]
            load.excess_running = max(0, load.running - least - RUNNING_TOLERANCE)
            output = replica.output_tokens if prompt.output_tokens is None else min(prompt.output_tokens,
                                                                                    replica.output_tokens)
            prediction = predict(Demand(prompt.tokens, keys.block_size, output), match, rates, load,
                                 self._reuse)
            candidates.append(Candidate(replica.index, prediction, len(replica.flights), replica.sent_tokens,
                                        load.device_use, session == replica.index))
        chosen = self.policy.choose(self._decoders(candidates), RequestFacts(prompt.tokens, self.busy(now)))
        keys, match = matches[chosen.replica]
        return Decision(self.replicas[chosen.replica], chosen.prediction, keys, match.blocks)

    def send(self, prompt: Prompt, decision: Decision, now: float) -> Flight:
        """Record that the request is sent as decided; `end` must follow."""
        replica, keys = decision.replica, decision.keys
        flight = Flight(replica.index, prompt.tokens, decision.prediction, now, not replica.waiting,
                        keys.keys, decision.first, keys.block_size, decision.remote_prefill)
        replica.send(flight)
        self.prefix_index.expect(replica.index, flight.keys[flight.first:])
        if prompt.session is not None:
            self._sessions[prompt.session] = replica.index
            self._sessions.move_to_end(prompt.session)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)
        self._work = self._decayed(now) + decision.prediction.work
        self._counted = now
        return flight

    def count(self, prompt: Prompt, decision: Decision) -> None:
        """Count a prompt once, however often it is sent: its tokens found in caches, and those that could have been."""
        if not prompt.tokens:
            return
        self.prompt_tokens += prompt.tokens
        keys, size = decision.keys.keys, decision.keys.block_size
        seen, before = self._seen, self._seen_before
        # All blocks of a prompt enter a generation together, so a generation with a block also has those before it.
        known = bisect_left(keys, True, key=lambda key: key not in seen and key not in before)
        self.reusable_tokens += min(known, (prompt.tokens - 1) // size) * size
        seen.update(keys)
        if len(seen) > MOST_SEEN:
            self._seen, self._seen_before = set(), seen
        found = decision.prediction.cached_tokens / prompt.tokens
        self._reuse += REUSE_SMOOTHING * (found - self._reuse)

    def begin(self, flight: Flight, now: float) -> None:
        """Record the first token of a request: its prompt has been computed."""
        self.replicas[flight.replica].begin(flight, now)
        self.mirrors[flight.replica].computed(flight.keys)

    def end(self, flight: Flight, now: float, output_tokens: int | None = None,
            cached_tokens: int | None = None) -> None:
        """Record that a request finished or failed. `cached_tokens` is the number that the answer reported."""
        self.replicas[flight.replica].end(flight, now, output_tokens)
        self.prefix_index.unexpect(flight.replica, flight.keys[flight.first:])
        if cached_tokens is not None and flight.first:
            found = cached_tokens + flight.block_size >= flight.prediction.cached_tokens
            self.mirrors[flight.replica].answered(found)

    def busy(self, now: float) -> float:
        """Return the share of time that replicas compute prompts, 0 to 1."""
        ready = sum(replica.ready for replica in self.replicas)
        return min(self._decayed(now) / (BUSY_SECONDS * ready), 1.0) if ready else 0.0

    def _decoders(self, candidates: list[Candidate]) -> list[Candidate]:
        """Leave out replicas for prompts, unless all others would give the first token much later."""
        decoders = [each for each in candidates if not self.replicas[each.replica].prefill_role]
        if not decoders or len(decoders) == len(candidates):
            return candidates
        soonest = min(each.prediction.first_token for each in candidates)
        late = min(each.prediction.first_token for each in decoders) > soonest + ROLE_SECONDS
        return candidates if late else decoders

    def _decayed(self, now: float) -> float:
        return self._work * math.exp(min(self._counted - now, 0.0) / BUSY_SECONDS)

    def _matches(self, prompt: Prompt, usable: Sequence[Replica]) -> dict[int, tuple[Keys, Match]]:
        found: dict[int, tuple[Keys, Match]] = {}
        for space in {self.spaces[replica.index] for replica in usable}:
            keys = prompt.keys.get(space, Keys())
            indices = [replica.index for replica in usable if self.spaces[replica.index] == space]
            found.update((index, (keys, match)) for index, match in self.prefix_index.match(keys.keys, indices).items())
        return found
