"""The data of the page at `/`: the latest requests with their phases, tokens per second, and the engine's state.

No text of a prompt or an answer is kept here.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import spillover
from spillover.engine.output.output_processor import Answer
from spillover.engine.requests.request import Request
from spillover.memory.spill.report import TierReport
from spillover.server.telemetry.link_metrics import ranks_live
from spillover.server.telemetry.metrics import Metrics, TokenCounts, finish_reason
from spillover.server.telemetry.speculation_metrics import speculation_live
from spillover.server.telemetry.usage import Usage

if TYPE_CHECKING:
    from spillover.server.engine.async_llm import AsyncLLM
    from spillover.server.engine.engine_keeper import EngineInfo

KEPT_REQUESTS = 200
SHOWN_REQUESTS = 40
HISTORY_SECONDS = 120
SAMPLE_SECONDS = 1.0
CLIENT_LEFT = 499  # status counted for a request whose client disconnected before the response
UNAVAILABLE = 503
TIERS = ("device", "host", "pool", "disk", "remote")


@dataclass(frozen=True, slots=True)
class Phases:
    """One request as drawn in the timeline. Times are monotonic seconds, 0 for those not reached."""

    id: str
    kind: str  # "chat" | "completion" | ...
    status: str  # "running" | "ok" | "aborted" | "error"
    arrived: float
    scheduled: float
    first_token: float
    finished: float
    restore: float  # seconds of restoring KV
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None  # None until it is scheduled

    @classmethod
    def of(cls, answer: Answer, kind: str, status: str) -> Phases:
        requests = answer.requests
        parent = requests[0]
        many = len(requests) > 1
        return cls(
            id=parent.request_id.rsplit(".", 1)[0] if many else parent.request_id,
            kind=kind,
            status=status,
            arrived=parent.arrived,
            scheduled=parent.scheduled,
            first_token=parent.first_token,
            finished=0.0 if status == "running" else max(r.finished for r in requests) or time.monotonic(),
            restore=parent.timings.restore,
            prompt_tokens=parent.num_prompt,
            output_tokens=sum(len(r.token_ids) - r.num_prompt for r in requests),
            cached_tokens=parent.sources.cached if parent.sources is not None else None,
        )

    def row(self, now: float, waits: bool = True) -> dict[str, Any]:
        """Return the age and the phase lengths in seconds; a phase that has not begun has length 0. The time at which a
        request left the queue is only known with its first token: until then, `waits` says whether it still waits."""
        end = self.finished or now
        scheduled = min(self.scheduled or (end if waits or self.finished else self.arrived), end)
        first = min(self.first_token or end, end)
        return {
            "id": self.id,
            "kind": self.kind,
            "status": self.status,
            "running": self.status == "running",
            "age": now - self.arrived,
            "queue": scheduled - self.arrived,
            "restore": self.restore,
            "prefill": max(0.0, first - scheduled - self.restore),
            "decode": end - first,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
        }


class Recorder:
    """A record of the start and end of requests; samples the engine once per second while any are running."""

    def __init__(self, client: AsyncLLM, model_name: str, key_names: Iterable[str] = (),
                 vllm_names: bool = False) -> None:
        self._client = client
        self._model_name = model_name
        self.usage = Usage(key_names)
        self.metrics = Metrics(model_name, self.usage, vllm_names)
        self._started = time.monotonic()
        self._running: dict[int, tuple[Answer, str]] = {}  # keyed by the answer's id()
        self._latest: deque[Phases] = deque(maxlen=KEPT_REQUESTS)
        self._rate = RateHistory(HISTORY_SECONDS, self._started)
        self._prefill_rate = RateHistory(HISTORY_SECONDS, self._started)
        self._refused = self._failed = 0
        self._sampling: asyncio.Task[None] | None = None

    # Called by the routes

    def started(self, answer: Answer, kind: str) -> None:
        self._running[id(answer)] = answer, kind
        if self._sampling is None or self._sampling.done():
            self._sample()
            self._sampling = asyncio.get_running_loop().create_task(self._keep_sampling())

    def finished(self, answer: Answer, status: str | int) -> None:
        """Record an answer's end. `status`: "ok", "aborted", "error", or an HTTP status. A second call does nothing."""
        _, kind = self._running.pop(id(answer), (None, None))
        if kind is not None:
            word = _word(answer, status)
            self._latest.append(Phases.of(answer, kind, word))
            self._failed += status == "error"  # a stream failed after its start; other failures have an HTTP status
            self.metrics.observe(answer, failed=word == "error")

    def count_http(self, route: str, status: int) -> None:
        if route.startswith("/v1/"):
            self._refused += status == UNAVAILABLE or (400 <= status < 500 and status != CLIENT_LEFT)
            self._failed += status >= 500 and status != UNAVAILABLE
        self.metrics.count_http(route, status)

    def count_refusal(self, reason: str) -> None:
        self.metrics.count_refusal(reason)

    # What the page and Prometheus read

    def scrape(self, draining: bool = False) -> bytes:
        """Return the text of /metrics. `draining`: the server was told to stop."""
        return self.metrics.render(self._client.latest_stats(), self._info(), TokenCounts.of(self._sequences()),
                                   self._client.heartbeat_age, self._client.hangs, self._client.ready, draining)

    def live(self) -> dict[str, Any]:
        """Return all values that the page shows."""
        now = time.monotonic()
        tokens = self._sample()
        stats, info, totals = self._client.latest_stats(), self._info(), self.metrics.engine.values
        shown = [Phases.of(answer, kind, "running") for answer, kind in self._running.values()]
        shown += reversed(self._latest)
        shown.sort(key=lambda phases: phases.arrived, reverse=True)
        up = self._client.ready
        waiting = stats.num_waiting if up else 0
        # The requests that arrived last are those that wait.
        unscheduled = [phases.id for phases in shown if phases.status == "running" and not phases.scheduled]
        queued = set(unscheduled[:waiting])
        return {
            "version": spillover.__version__,
            "model": self._model_name,
            "state": self._client.engine_state,
            "uptime": now - self._started,
            "restarts": info.restarts if info is not None else 0,
            **_facts(info),
            "blocks": stats.blocks_total,
            "block_size": stats.block_size or (info.plan.block_size if info is not None else 0),
            "running": stats.num_running if up else 0,
            "waiting": waiting,
            "generation_rate": self._rate.seconds(),
            "prefill_rate": self._prefill_rate.seconds(),
            "refused": self._refused,
            "failed": self._failed,
            "prompt_tokens": tokens.prompt,
            "generation_tokens": tokens.output,
            "sources": tokens.sources,
            "preemptions": totals["preemptions"],
            "latency": _latency(self._latest),
            "tiers": [self._tier(name) for name in TIERS],
            "speculation": speculation_live(info.config.speculation if info is not None else None, totals),
            "ranks": ranks_live(stats.ranks),
            "requests": [phases.row(now, phases.id in queued) for phases in shown[:SHOWN_REQUESTS]],
        }

    def _tier(self, name: str) -> dict[str, Any]:
        """Return a tier's bytes; `total` is 0 if it has no KV blocks, `traffic` is absent if it moves no KV."""
        use = next((tier for tier in self._client.latest_stats().tiers if tier.name == name), None)
        if use is None:
            return {"name": name, "total": 0, "used": 0, "kept": 0, "weights": 0}
        shown = {"name": name, "total": use.kv_bytes, "used": use.kv_used_bytes, "kept": use.kv_cached_bytes,
                 "weights": use.weight_bytes}
        report = next((report for report in self.metrics.engine.tiers if report.name == name), None)
        return shown if report is None else {**shown, "traffic": _traffic(report)}

    # Sampling, once per second

    async def _keep_sampling(self) -> None:
        while self._running:
            await asyncio.sleep(SAMPLE_SECONDS)
            self._sample()

    def _sample(self) -> TokenCounts:
        tokens = self.metrics.ended.plus(TokenCounts.of(self._sequences()))
        self._rate.update(tokens.output, time.monotonic())
        self._prefill_rate.update(tokens.sources["computed"], time.monotonic())
        self.metrics.sample(self._client.latest_stats(), self._info())
        return tokens

    def _sequences(self) -> Iterator[Request]:
        return (request for answer, _ in self._running.values() for request in answer.requests)

    def _info(self) -> EngineInfo | None:
        return getattr(self._client, "info", None)  # not set before the engine's first start


class RateHistory:
    """Events per second over the last `length` seconds, from samples of a total."""

    def __init__(self, length: int, now: float) -> None:
        self._buckets: deque[float] = deque([0.0] * length, maxlen=length)  # the last bucket is the current second
        self._second = int(now)
        self._time = now
        self._total = 0

    def update(self, total: int, now: float) -> None:
        """Spread the events since the last update evenly over the time since then."""
        rate = (total - self._total) / (now - self._time) if now > self._time else 0.0
        self._second = max(self._second, int(now) - len(self._buckets))
        at = max(self._time, float(self._second))
        while self._second < int(now):
            self._second += 1
            self._buckets[-1] += rate * (self._second - at)
            self._buckets.append(0.0)
            at = float(self._second)
        self._buckets[-1] += rate * (now - at)
        self._time, self._total = now, total

    def seconds(self) -> list[float]:
        """Return the rates of the seconds, oldest first; the last second is not over yet."""
        return [round(value, 2) for value in self._buckets]


def _word(answer: Answer, status: str | int) -> str:
    if isinstance(status, str):
        return status
    if any(finish_reason(request) == "abort" for request in answer.requests):
        return "aborted"
    return "ok" if status < 400 else "error"


def _facts(info: EngineInfo | None) -> dict[str, Any]:
    if info is None:
        return {"device": None, "dtype": None, "max_model_len": None, "max_num_seqs": None, "null_model": False}
    plan = info.plan
    return {"device": plan.device_name, "dtype": plan.dtype, "max_model_len": plan.max_model_len,
            "max_num_seqs": plan.max_num_seqs, "null_model": info.null_model}


def _traffic(report: TierReport) -> dict[str, Any]:
    """Return bytes and rates to and from the tier; an unknown rate is None."""
    return {
        "in": {"bytes": report.bytes_in, "rate": report.rate_in, "link": report.link_in},
        "out": {"bytes": report.bytes_out, "rate": report.rate_out, "link": report.link_out},
        "hit_tokens": report.hit_tokens,
        "failures": report.failures,
        "dropped": report.dropped,
        "available": report.available,
    }


def _latency(latest: Iterable[Phases]) -> dict[str, Any]:
    """Return median and 99th percentile of the kept requests that finished well."""
    done = [phases for phases in latest if phases.status == "ok" and phases.first_token]
    ttft = [phases.first_token - phases.arrived for phases in done]
    tpot = [(phases.finished - phases.first_token) / (phases.output_tokens - 1)
            for phases in done if phases.output_tokens > 1]
    return {"count": len(done), "ttft": _spread(ttft), "tpot": _spread(tpot)}


def _spread(values: list[float]) -> dict[str, float] | None:
    """Return the median, and the 99th percentile as the nearest rank, which is one of the values."""
    if not values:
        return None
    ranked = sorted(values)
    return {"p50": statistics.median(ranked), "p99": ranked[math.ceil(0.99 * len(ranked)) - 1]}
