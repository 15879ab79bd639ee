"""The records that a run of the load generator produces: raw events, without any averages.

Every metric is derived from these records (`serving_metrics`); none is stored here. Times are in seconds of
`time.perf_counter()` since the run's start; `Run.start_unix` is that start in wall-clock time, so that samples of
monitors can be aligned with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as the client observed it."""

    index: int  # index of the request in the workload
    scheduled: float  # time at which it should have been sent
    sent: float  # time at which its bytes were passed to the socket
    chunks: tuple[tuple[float, int], ...]  # (time, new tokens) of every chunk that carried text or token ids
    done: float  # time at which the stream ended or failed
    prompt_tokens: int  # number from the server's usage, or the number sent if there is none
    output_tokens: int  # number from usage, else of token ids, else by the tokenizer
    requested_output_len: int  # number of tokens requested
    error: str | None = None  # the failure, if any; a failed request is counted but not averaged
    sources: Mapping[str, int] | None = None  # number of prompt tokens by source, if the server reports it
    timings: Mapping[str, float] | None = None  # seconds of queue, restore, prefill and decode, if reported
    session: int | None = None
    turn: int = 0
    text: str = ""  # the answer's text, only with --save-detailed

    @property
    def ok(self) -> bool:
        return self.error is None

    def to_json(self) -> dict[str, Any]:
        return {
            "index": self.index, "scheduled": self.scheduled, "sent": self.sent,
            "chunks": [list(chunk) for chunk in self.chunks], "done": self.done,
            "prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens,
            "requested_output_len": self.requested_output_len, "error": self.error,
            "sources": None if self.sources is None else dict(self.sources),
            "timings": None if self.timings is None else dict(self.timings),
            "session": self.session, "turn": self.turn, "text": self.text,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RequestRecord:
        given = {**value, "chunks": tuple((float(at), int(count)) for at, count in value["chunks"])}
        if "asked_output" in given:  # the name in runs recorded by earlier versions
            given["requested_output_len"] = given.pop("asked_output")
        return cls(**given)


@dataclass(frozen=True)
class ClientHealth:
    """Whether the client kept up. `lag` is delay added by the client, not the server: the time sent minus the time at
    which the request was due and, with a concurrency limit, had a free slot."""

    lag_p50: float = 0.0
    lag_p99: float = 0.0
    lag_max: float = 0.0
    busy: float = 0.0  # share of the run in which the busiest client process used the CPU, 0 to 1
    delay_p99: float = 0.0  # seconds by which the event loop was late, p99: the error of a time of arrival
    processes: int = 1
    saturated: str | None = None  # why the client's own limits affect the results; None if they do not

    def to_json(self) -> dict[str, Any]:
        return {"lag_p50": self.lag_p50, "lag_p99": self.lag_p99, "lag_max": self.lag_max, "busy": self.busy,
                "delay_p99": self.delay_p99, "processes": self.processes, "saturated": self.saturated}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ClientHealth:
        return cls(**value)


@dataclass(frozen=True)
class Run:
    """Everything recorded in one run of the load generator."""

    records: tuple[RequestRecord, ...]
    start_unix: float  # wall clock at time 0
    duration: float  # seconds from the first request sent to the last one completed
    client: ClientHealth
    window: tuple[float, float]  # (begin, end) of the steady state, as `serving_metrics.steady_window` finds it
    counters: Mapping[str, float] = field(default_factory=dict)  # of the server: after minus before; may be empty
    details: Mapping[str, Any] = field(default_factory=dict)  # workload, arrival, configured rate, url, server version

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
