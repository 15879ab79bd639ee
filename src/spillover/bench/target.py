"""The interface between a benchmark and the engine it drives: requests, results, and the limits to compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

PHASES = ("queue", "restore", "prefill", "decode")  # phases of a request, as timed by the server
SOURCES = ("computed", "device", "host", "pool", "disk", "remote")


@dataclass(frozen=True)
class BenchRequest:
    """A request in token ids, not text: decoding and encoding again would change the promised length."""

    prompt_token_ids: tuple[int, ...]
    output_len: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.output_len


@dataclass(frozen=True)
class Completion:
    """The result of one request. Seconds are measured by the target; zero if it does not report them."""

    output_tokens: int
    sources: Mapping[str, int] = field(default_factory=dict)  # number of prompt tokens by source; the sum is the prompt
    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    first_token: float = 0.0  # seconds from arrival to the first output token
    token_ids: tuple[int, ...] = ()

    @property
    def cached(self) -> int:
        """Return the number of prompt tokens that were not computed."""
        return sum(count for source, count in self.sources.items() if source != "computed")


@dataclass(frozen=True)
class Counters:
    """Totals since the target was created; a benchmark takes differences of all but the first two."""

    num_blocks: int = 0
    block_size: int = 0
    steps: int = 0
    preemptions: int = 0
    # Summed over steps, so that the ratio of the two is the mean over time.
    slots_held: int = 0  # token slots in blocks that requests hold
    slots_wasted: int = 0  # slots of held blocks that have no token: internal fragmentation

    def since(self, earlier: Counters) -> Counters:
        return Counters(self.num_blocks, self.block_size, self.steps - earlier.steps,
                        self.preemptions - earlier.preemptions, self.slots_held - earlier.slots_held,
                        self.slots_wasted - earlier.slots_wasted)


@dataclass(frozen=True)
class TierTraffic:
    """The traffic of one KV tier since the target was created. `in` is to the tier, `out` from it; seconds count only
    the time in which bytes were moving."""

    name: str  # "host" | "pool" | "disk" | "remote"
    blocks: int = 0  # blocks in the tier now
    bytes_in: int = 0
    bytes_out: int = 0
    seconds_in: float = 0.0
    seconds_out: float = 0.0
    failures: int = 0
    link_in: float | None = None  # measured bytes per second of the link to the tier; None if not measured
    link_out: float | None = None

    def since(self, earlier: TierTraffic) -> TierTraffic:
        return replace(self, bytes_in=self.bytes_in - earlier.bytes_in, bytes_out=self.bytes_out - earlier.bytes_out,
                       seconds_in=self.seconds_in - earlier.seconds_in,
                       seconds_out=self.seconds_out - earlier.seconds_out, failures=self.failures - earlier.failures)

    def plus(self, other: TierTraffic) -> TierTraffic:
        return replace(self, bytes_in=self.bytes_in + other.bytes_in, bytes_out=self.bytes_out + other.bytes_out,
                       seconds_in=self.seconds_in + other.seconds_in,
                       seconds_out=self.seconds_out + other.seconds_out, failures=self.failures + other.failures)

    def directions(self) -> list[tuple[str, int, float | None, float | None]]:
        """Return (direction, bytes, bytes per second while moving, bytes per second of the link) by used direction."""
        ways = [("in", self.bytes_in, self.seconds_in, self.link_in),
                ("out", self.bytes_out, self.seconds_out, self.link_out)]
        return [(way, count, count / seconds if seconds > 0 else None, link)
                for way, count, seconds, link in ways if count]

    def as_dict(self) -> dict[str, Any]:
        ways = {way: {"bytes": count, "bytes_per_second": rate, "link_bytes_per_second": link,
                      "percent_of_link": 100 * rate / link if rate is not None and link else None}
                for way, count, rate, link in self.directions()}
        return {"tier": self.name, "blocks": self.blocks, "failures": self.failures, **ways}


@dataclass(frozen=True)
class Bound:
    """The least time a piece of work can take on this machine, and which resource binds."""

    seconds: float
    bytes: float
    flops: float
    name: str  # "memory" | "compute"


class Limits(Protocol):
    """The measured rates of this machine and the limits that follow from them for the model."""

    @property
    def memory_rate(self) -> float: ...  # bytes read per second

    @property
    def matrix_rate(self) -> float: ...  # FLOPs per second

    def again(self) -> Limits:
        """Measure the limits again, briefly."""

    def mean(self, other: Limits) -> Limits:
        """Return limits at rates halfway between these and the other's."""

    def step(self, batch: Sequence[tuple[int, int]]) -> Bound:
        """Return the limit of a step: (new tokens, tokens cached before it) of each request, which samples a token."""


class Generates(Protocol):
    """A loaded model, ready to use. `generate` runs each request to exactly its output length."""

    @property
    def max_num_seqs(self) -> int: ...  # maximum number of requests in a step

    @property
    def planned_bytes(self) -> int | None: ...  # planned memory of this process

    @property
    def limits(self) -> Limits | None: ...

    def generate(self, requests: Sequence[BenchRequest], progress: bool = False) -> list[Completion]: ...

    def counters(self) -> Counters: ...

    def reset_prefix_cache(self) -> None: ...

    def close(self) -> None: ...


class GeneratesWithTiers(Generates, Protocol):
    """A target that may keep KV below the device."""

    def tiers(self) -> tuple[TierTraffic, ...]:
        """Return the tiers, nearest first; empty if there are none."""
