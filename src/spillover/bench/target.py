"""What a benchmark drives, seen from outside: the requests it sends, what comes back, and the limits it is held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

PHASES = ("queue", "restore", "prefill", "decode")  # of a request, as the server times them
SOURCES = ("computed", "device", "host", "pool", "disk", "remote")


@dataclass(frozen=True)
class BenchRequest:
    """A request in token ids, not text: a decode and encode round trip would change the promised length."""

    prompt_token_ids: tuple[int, ...]
    output_len: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.output_len


@dataclass(frozen=True)
class Completion:
    """One request's result. Seconds are the target's own; zero where it does not tell."""

    output_tokens: int
    sources: Mapping[str, int] = field(default_factory=dict)  # prompt tokens by source; they add up to the prompt
    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    first_token: float = 0.0  # from arrival to the first output token
    token_ids: tuple[int, ...] = ()

    @property
    def cached(self) -> int:
        """Return the prompt tokens that were not computed."""
        return sum(count for source, count in self.sources.items() if source != "computed")


@dataclass(frozen=True)
class Counters:
    """Totals since the target was made; a benchmark takes differences, except of the first two."""

    num_blocks: int = 0
    block_size: int = 0
    steps: int = 0
    preemptions: int = 0
    # Summed over steps, so that a ratio of the two is the mean over time.
    slots_held: int = 0  # token slots in blocks that requests hold
    slots_wasted: int = 0  # slots of held blocks without a token: internal fragmentation

    def since(self, earlier: Counters) -> Counters:
        return Counters(self.num_blocks, self.block_size, self.steps - earlier.steps,
                        self.preemptions - earlier.preemptions, self.slots_held - earlier.slots_held,
                        self.slots_wasted - earlier.slots_wasted)


@dataclass(frozen=True)
class TierTraffic:
    """What one KV tier moved since the target was made. `in` is towards the tier, `out` from it; seconds are those
    that bytes were moving."""

    name: str  # "host" | "pool" | "disk" | "remote"
    blocks: int = 0  # blocks that it holds now
    bytes_in: int = 0
    bytes_out: int = 0
    seconds_in: float = 0.0
    seconds_out: float = 0.0
    failures: int = 0
    link_in: float | None = None  # bytes a second that the way there was measured at; None: it was not
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
        """Return (which way, bytes, bytes a second while they moved, that of the link), for each way that was used."""
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
    """The least time a piece of work can take on this machine, and why."""

    seconds: float
    bytes: float
    flops: float
    name: str  # "memory" | "compute"


class Limits(Protocol):
    """This machine's measured rates and what they allow for this model."""

    @property
    def memory_rate(self) -> float: ...  # bytes read a second

    @property
    def matrix_rate(self) -> float: ...  # FLOP a second

    def again(self) -> Limits:
        """Measure the limits again, briefly."""

    def mean(self, other: Limits) -> Limits:
        """Return limits at rates halfway between these and the other's."""

    def step(self, batch: Sequence[tuple[int, int]]) -> Bound:
        """Return the limit of a step: (new tokens, tokens cached before it) of each request, which samples a token."""


class Generates(Protocol):
    """A model loaded and ready. `generate` runs each request to exactly its output length."""

    @property
    def max_num_seqs(self) -> int: ...  # most requests in one step

    @property
    def planned_bytes(self) -> int | None: ...  # what the plan says this process will hold

    @property
    def limits(self) -> Limits | None: ...

    def generate(self, requests: Sequence[BenchRequest], progress: bool = False) -> list[Completion]: ...

    def counters(self) -> Counters: ...

    def reset_prefix_cache(self) -> None: ...

    def close(self) -> None: ...


class GeneratesWithTiers(Generates, Protocol):
    """A target that may keep KV beside the device."""

    def tiers(self) -> tuple[TierTraffic, ...]:
        """Return the tiers, nearest first; empty where there are none."""
