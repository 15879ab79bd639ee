"""Predicts when a replica would give a prompt's first token, from its blocks, its waiting work and its measured rates.

Pure arithmetic in seconds, for routers and simulators. The cost of a request to others is separate from its own wait:
computing delays those queued after it, decoding slows those that decode too, and new blocks evict old ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from spillover.cluster.index import Match
from spillover.memory.kv.event_wire import CPU, STORAGE

USUAL_TOKEN_SECONDS = 1 / 5000  # seconds per token of prefill, until a replica has reported or shown its own
EQUAL_SHARE = 0.3  # share of the usual time per token within which replicas count as equally fast
EVICTING_SHARE = 0.8  # share of the device's blocks in use above which new blocks evict old ones


class Rates(NamedTuple):
    """The speed of a replica."""

    token_seconds: float = USUAL_TOKEN_SECONDS  # seconds per token of prefill
    block_seconds: Mapping[str, float] = MappingProxyType({})  # per block from host memory (CPU) or disk (STORAGE)
    least_seconds: float = 0.0  # to a first token if nothing waits and all is cached


def equalised_rates(rates: Sequence[Rates | None]) -> list[Rates]:
    """Return the rates to predict with. Replicas about as fast as most count as equally fast, because a measured
    difference of a few percent would send all requests to one; unmeasured ones count like most."""
    known = [each for each in rates if each is not None]
    usual = Rates(_median([each.token_seconds for each in known]),
                  least_seconds=_median([each.least_seconds for each in known])) if known else Rates()
    made = []
    for each in rates:
        if each is None:
            made.append(usual)
            continue
        near = abs(each.token_seconds - usual.token_seconds) <= EQUAL_SHARE * usual.token_seconds
        made.append(Rates(usual.token_seconds if near else each.token_seconds, each.block_seconds,
                          usual.least_seconds))
    return made


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


@dataclass(slots=True)
class Load:
    """The current work of a replica."""

    backlog_seconds: float = 0.0  # time to compute the prompts before this one
    running: int = 0  # number of sequences that decode
    excess_running: int = 0  # running sequences beyond the least busy replica's: the part a request avoids elsewhere
    open: int = 0  # number of running and waiting sequences
    max_num_seqs: int = 1 << 30  # maximum number of running sequences
    sequence_seconds: float = 0.0  # mean time that a sequence holds its slot
    device_use: float = 0.0  # share of the device's blocks that hold KV, 0 to 1


class Demand(NamedTuple):
    """The properties of a prompt that any replica must serve."""

    tokens: int
    block_size: int = 16
    output_tokens: float = 0.0  # expected number


class Prediction(NamedTuple):
    """The parts of the time to the first token in seconds, and the number of cached tokens."""

    queue: float  # waiting for earlier requests
    restore: float
    compute: float
    shared: float  # cost to other requests, as long as there are any
    cached_tokens: int
    least: float = 0.0  # the time that any request takes, however little it computes

    @property
    def work(self) -> float:
        """Return the time that the replica works on this prompt."""
        return self.restore + self.compute

    @property
    def first_token(self) -> float:
        return self.least + self.queue + self.work


def queue_seconds(load: Load) -> float:
    """Return how long a request waits: for the prompts before it, and for a slot if all are taken."""
    if load.open < load.max_num_seqs:
        return load.backlog_seconds
    return load.backlog_seconds + (load.open - load.max_num_seqs + 1) * load.sequence_seconds / load.max_num_seqs


def predict(demand: Demand, match: Match, rates: Rates, load: Load, reuse: float = 0.0) -> Prediction:
    """Predict the time to the first token. `reuse` is the recent share of tokens that are requested again, which
    determines the cost of evicting a block."""
    size, token = demand.block_size, rates.token_seconds
    cached = min(match.blocks, max(demand.tokens - 1, 0) // size) * size  # the last token is always computed
    restore = 0.0
    for medium, blocks in ((CPU, match.host), (STORAGE, match.storage)):
        restore += blocks * min(rates.block_seconds.get(medium, size * token), size * token)
    new = demand.tokens - cached
    compute = new * token
    queue = queue_seconds(load)
    eviction = min(max((load.device_use - EVICTING_SHARE) / (1 - EVICTING_SHARE), 0.0), 1.0) * reuse * new * min(
        token, rates.block_seconds.get(CPU, size * token) / size)
    slowdown = load.excess_running * demand.output_tokens * token
    return Prediction(queue, restore, compute, eviction + slowdown, cached, rates.least_seconds)
