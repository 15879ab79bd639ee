"""What a run of the load generator leaves behind: raw events, nothing averaged.

Every metric is derived from these records (`serving_metrics`); no metric is kept here. Times are seconds of
`time.perf_counter()` minus the run's start; `Run.start_unix` is that start by the wall clock, so that what monitors
saw can be laid beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as the client saw it."""

    index: int  # in the workload
    scheduled: float  # when it should have been sent
    sent: float  # when its bytes were handed to the socket
    chunks: tuple[tuple[float, int], ...]  # (time, new tokens) of every chunk that carried text or token ids
    done: float  # when the stream ended, or failed
    prompt_tokens: int  # usage's, else what we sent
    output_tokens: int  # usage's, else token ids', else the tokenizer's
    asked_output: int
    error: str | None = None  # a failed request is counted, never averaged in
    sources: Mapping[str, int] | None = None  # prompt tokens by where they came from, if the server tells
    timings: Mapping[str, float] | None = None  # queue, restore, prefill, decode seconds, if the server tells
    session: int | None = None
    turn: int = 0
    text: str = ""  # kept with --save-detailed only

    @property
    def ok(self) -> bool:
        return self.error is None

    def to_json(self) -> dict[str, Any]:
        return {
            "index": self.index, "scheduled": self.scheduled, "sent": self.sent,
            "chunks": [list(chunk) for chunk in self.chunks], "done": self.done,
            "prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens,
            "asked_output": self.asked_output, "error": self.error,
            "sources": None if self.sources is None else dict(self.sources),
            "timings": None if self.timings is None else dict(self.timings),
            "session": self.session, "turn": self.turn, "text": self.text,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RequestRecord:
        return cls(**{**value, "chunks": tuple((float(at), int(count)) for at, count in value["chunks"])})


@dataclass(frozen=True)
class ClientHealth:
    """Whether the client kept up. `lag` is what it, not the server, added: sent minus the time at which the request was
    due and, under a limit of concurrency, its turn."""

    lag_p50: float = 0.0
    lag_p99: float = 0.0
    lag_max: float = 0.0
    busy: float = 0.0  # share of the run's time that the busiest process computed, 0 to 1
    delay_p99: float = 0.0  # by which the event loop answered late, seconds: how wrong a time of arrival may be
    processes: int = 1
    saturated: str | None = None  # why the client's own limits are in the numbers; None where they are not

    def to_json(self) -> dict[str, Any]:
        return {"lag_p50": self.lag_p50, "lag_p99": self.lag_p99, "lag_max": self.lag_max, "busy": self.busy,
                "delay_p99": self.delay_p99, "processes": self.processes, "saturated": self.saturated}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ClientHealth:
        return cls(**value)


@dataclass(frozen=True)
class Run:
    """Everything one run of the load generator gave."""

    records: tuple[RequestRecord, ...]
    start_unix: float  # wall clock at time 0
    duration: float  # first sent to last done
    client: ClientHealth
    window: tuple[float, float]  # steady state, as `serving_metrics.steady_window` finds it
    counters: Mapping[str, float] = field(default_factory=dict)  # the server's, after minus before; may be empty
    details: Mapping[str, Any] = field(default_factory=dict)  # workload, arrival, rate asked, url, server's version ...

    @property
    def completed(self) -> Sequence[RequestRecord]:
        return [record for record in self.records if record.ok]

    @property
    def failed(self) -> Sequence[RequestRecord]:
        return [record for record in self.records if not record.ok]

    def to_json(self) -> dict[str, Any]:
        return {"start_unix": self.start_unix, "duration": self.duration, "client": self.client.to_json(),
                "window": list(self.window), "counters": dict(self.counters), "details": dict(self.details),
                "records": [record.to_json() for record in self.records]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Run:
        return cls(
            records=tuple(RequestRecord.from_json(record) for record in value["records"]),
            start_unix=value["start_unix"],
            duration=value["duration"],
            client=ClientHealth.from_json(value["client"]),
            window=(value["window"][0], value["window"][1]),
            counters=value["counters"],
            details=value["details"],
        )
