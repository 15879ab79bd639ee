"""What to ask of a server: one request of a workload, before anybody has sent it.

A prompt is token ids where a length is promised (decode -> encode round trips change lengths) and text otherwise. In a
session `prompt` is only what the turn adds: whoever sends it puts everything said before in front.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from spillover.bench.workloads.workload_stats import Shape, WorkloadStats

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class ServeRequest:
    prompt: tuple[int, ...] | str
    prompt_len: int  # tokens of `prompt`; an estimate where it is text (the server's usage is the truth)
    output_len: int
    at: float | None = None  # seconds after the first request of a trace; None: arrivals are not the workload's matter
    session: int | None = None
    turn: int = 0
    think: float = 0.0  # seconds between the end of the turn before and this one
    ignore_eos: bool = True  # the answer has exactly output_len tokens
    extra: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)  # more fields of the request's body


class ServeWorkload(Protocol):
    """A workload to serve: `requests(repeat)` keeps lengths, times and sharing and changes the tokens; repeat -1 is the
    warm-up's, whose prompts are never those of a measured repeat."""

    @property
    def name(self) -> str: ...

    @property
    def shapes(self) -> Sequence[Shape]: ...  # the requests without their tokens

    def requests(self, repeat: int) -> list[ServeRequest]: ...

    def stats(self) -> WorkloadStats: ...
