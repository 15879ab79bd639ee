"""Statistics of a workload: lengths, prefix sharing, and total KV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from spillover.bench.workloads.sharing import BLOCK_SIZE, Part, Sharing, simulate

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class Shape:
    """A request without its tokens. In a session, `parts` is only what the turn adds."""

    parts: tuple[Part, ...]
    output_len: int
    at: float | None = None
    session: int | None = None
    turn: int = 0
    think: float = 0.0

    @property
    def prompt_len(self) -> int:
        return sum(part.length for part in self.parts)


@dataclass(frozen=True)
class Lengths:
    mean: float
    p50: float
    p90: float
    p99: float
    max: int
    total: int

    @classmethod
    def of(cls, values: Sequence[int]) -> Lengths:
        if not values:
            return cls(0.0, 0.0, 0.0, 0.0, 0, 0)
        p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
        return cls(float(np.mean(values)), p50, p90, p99, max(values), sum(values))


@dataclass(frozen=True)
class WorkloadStats:
    """The statistics of one repeat; every repeat has the same."""

    name: str
    count: int
    sessions: int  # number of sessions; 0 if requests are independent
    prompt: Lengths  # lengths as the server sees them, with all earlier turns of a session
    output: Lengths
    shared_tokens: int  # number of prompt tokens that an infinite prefix cache could serve
    working_set_tokens: int
    duration: float | None = None  # seconds from the first request of a trace to the last
    estimated: bool = False  # whether lengths are estimated from characters, without a tokenizer
    notes: tuple[str, ...] = ()

    @property
    def total_tokens(self) -> int:
        return self.prompt.total + self.output.total

    @property
    def sharing(self) -> float:
        return self.shared_tokens / self.prompt.total if self.prompt.total else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "notes": list(self.notes), "sharing": self.sharing, "total_tokens": self.total_tokens,
                "block_size": BLOCK_SIZE}

    def table(self) -> RenderableType:
        """Return the table of lengths, followed by the other statistics as sentences."""
        from rich.console import Group
        from rich.text import Text

        from spillover.bench.table import make_table

        guess = "about " if self.estimated else ""
        asked = f"{self.count:,} requests" + (f" in {self.sessions:,} sessions" if self.sessions else "")
        table = make_table(f"Workload {self.name}: {asked}", "tokens", "mean", "p50", "p90", "p99", "max", "total")
        for name, lengths in (("prompt", self.prompt), ("output", self.output)):
            table.add_row(f"{guess}{name}", f"{lengths.mean:,.1f}", f"{lengths.p50:,.0f}", f"{lengths.p90:,.0f}",
                          f"{lengths.p99:,.0f}", f"{lengths.max:,}", f"{lengths.total:,}")
        return Group(table, *(Text(sentence) for sentence in self.sentences()))

    def sentences(self) -> Iterator[str]:
        yield (f"Prefix sharing: an infinite cache with blocks of {BLOCK_SIZE} could serve {self.sharing:.1%} of "
               f"prompt tokens ({self.shared_tokens:,})")
        yield f"Working set: {self.working_set_tokens:,} distinct tokens of KV"
        if self.duration is not None:
            rate = f", {(self.count - 1) / self.duration:,.2f} requests/s" if self.duration > 0 else ""
            yield f"Trace: {self.duration:,.1f} s{rate}"
        yield from self.notes


def measure(name: str, shapes: Sequence[Shape], estimated: bool = False, notes: tuple[str, ...] = ()) -> WorkloadStats:
    prompts = list(whole_prompts(shapes))
    sharing: Sharing = simulate(prompts)
    times = [shape.at for shape in shapes if shape.at is not None]
    return WorkloadStats(
        name=name, count=len(shapes), sessions=len({shape.session for shape in shapes} - {None}),
        prompt=Lengths.of([sum(part.length for part in parts) for parts, _ in prompts]),
        output=Lengths.of([shape.output_len for shape in shapes]), shared_tokens=sharing.shared_tokens,
        working_set_tokens=sharing.working_set_tokens, duration=max(times) - min(times) if times else None,
        estimated=estimated, notes=notes)


def whole_prompts(shapes: Iterable[Shape]) -> Iterator[tuple[tuple[Part, ...], Part]]:
    """Yield each request's prompt, with all earlier turns of its session, and its answer, which is never shared."""
    said: dict[int, tuple[Part, ...]] = {}
    for index, shape in enumerate(shapes):
        answer = Part(("answer", index), shape.output_len)
        before = () if shape.session is None else said.get(shape.session, ())
        prompt = before + shape.parts
        if shape.session is not None:
            said[shape.session] = (*prompt, answer)
        yield prompt, answer
