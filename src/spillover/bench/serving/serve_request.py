"""One request of a workload, as it is before being sent.

A prompt is token ids where an exact length is needed (a decode -> encode round trip changes lengths) and text
otherwise. In a session `prompt` is only the text or tokens that the turn adds: the sender prepends all earlier turns.
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
    prompt_len: int  # tokens of `prompt`; an estimate for text (the server's usage is exact)
    output_len: int
    at: float | None = None  # seconds after the first request of a trace; None if the workload sets no times
    session: int | None = None
    turn: int = 0
    think: float = 0.0  # seconds between the end of the previous turn and this one
    ignore_eos: bool = True  # whether the answer must have exactly output_len tokens
    extra: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)  # additional fields of the request's body


class ServeWorkload(Protocol):
    """A workload to serve: `requests(repeat)` keeps lengths, times and sharing and changes the tokens; repeat -1 is the
    warm-up, whose prompts never equal those of a measured repeat."""

    @property
    def name(self) -> str: ...

    @property
    def shapes(self) -> Sequence[Shape]: ...  # the requests without their tokens

    def requests(self, repeat: int) -> list[ServeRequest]: ...

    def stats(self) -> WorkloadStats: ...
