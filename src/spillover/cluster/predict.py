"""When a replica would give the first token of a prompt, from what it holds, what waits there and its measured rates.

Pure arithmetic in seconds, for a router as for a simulator. What one request costs others is counted apart from what it
waits itself: computing delays those behind it, decoding beside others slows them, and new blocks push old ones out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from spillover.cluster.index import Match
from spillover.memory.kv.event_wire import CPU, STORAGE

USUAL_TOKEN_SECONDS = 1 / 5000  # of prefill, until a replica has told or shown its own
ALIKE = 0.3  # share of the usual time per token within which replicas count as equally fast
CROWDED = 0.8  # share of the device's blocks in use from which on new ones push out old ones


class Rates(NamedTuple):
    """How fast a replica is."""

    token_seconds: float = USUAL_TOKEN_SECONDS  # a token of prefill
    block_seconds: Mapping[str, float] = MappingProxyType({})  # a block from host memory (CPU) or disk (STORAGE)
    least_seconds: float = 0.0  # to a first token when nothing waits and all is cached


def alike(rates: Sequence[Rates | None]) -> list[Rates]:
    """Return what to predict with: replicas that are about as fast as most count as equally fast, for a measured
    difference of a few percent would send all to one; those not measured yet count as most do."""
    known = [each for each in rates if each is not None]
    usual = Rates(_middle([each.token_seconds for each in known]),
                  least_seconds=_middle([each.least_seconds for each in known])) if known else Rates()
    made = []
    for each in rates:
        if each is None:
            made.append(usual)
            continue
        near = abs(each.token_seconds - usual.token_seconds) <= ALIKE * usual.token_seconds
        made.append(Rates(usual.token_seconds if near else each.token_seconds, each.block_seconds,
                          usual.least_seconds))
    return made


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


@dataclass(slots=True)
class Load:
    """What a replica has to do already."""

    backlog_seconds: float = 0.0  # of prompts before this one
    running: int = 0  # sequences that decode
    crowd: int = 0  # of these, those beyond what any replica has to have: what a request would suffer from here alone
    open: int = 0  # these, and those that wait
    slots: int = 1 << 30  # sequences that may run at once
    sequence_seconds: float = 0.0  # that a sequence holds its slot, on average
    device_use: float = 0.0  # share of the device's blocks that hold KV, 0 to 1


class Demand(NamedTuple):
    """What a prompt asks of any replica."""

    tokens: int
    block_size: int = 16
    output_tokens: float = 0.0  # expected


class Prediction(NamedTuple):
    """Seconds, and where the prompt's tokens would come from."""

    queue: float  # behind others
    restore: float
    compute: float
    shared: float  # that it costs others, as long as they have something to do
    cached_tokens: int
    least: float = 0.0  # that any request takes, however little is to be computed

    @property
    def work(self) -> float:
        """Return what the replica is busy with for this prompt."""
        return self.restore + self.compute

    @property
    def first_token(self) -> float:
        return self.least + self.queue + self.work


def queue_seconds(load: Load) -> float:
    """Return how long a request waits: for the prompts before it, and for a slot if all are taken."""
    if load.open < load.slots:
        return load.backlog_seconds
    return load.backlog_seconds + (load.open - load.slots + 1) * load.sequence_seconds / load.slots


def predict(demand: Demand, match: Match, rates: Rates, load: Load, reuse: float = 0.0) -> Prediction:
    """Predict the time to the first token. `reuse`: share of tokens that are asked for again, lately: what a block that
    is pushed out will cost."""
    size, token = demand.block_size, rates.token_seconds
    cached = min(match.blocks, max(demand.tokens - 1, 0) // size) * size  # the last token is always computed
    restore = 0.0
    for medium, blocks in ((CPU, match.host), (STORAGE, match.storage)):
        restore += blocks * min(rates.block_seconds.get(medium, size * token), size * token)
    new = demand.tokens - cached
    compute = new * token
    queue = queue_seconds(load)
    lost = min(max((load.device_use - CROWDED) / (1 - CROWDED), 0.0), 1.0) * reuse * new * min(
        token, rates.block_seconds.get(CPU, size * token) / size)
    beside = load.crowd * demand.output_tokens * token
    return Prediction(queue, restore, compute, lost + beside, cached, rates.least_seconds)
