"""Prometheus metrics for /metrics: vLLM's metric names under `spillover:`, and the sources of prompt tokens.

A request is counted once, when it has finished. The totals of an engine process restart at zero with the process; they
are added up here, so that no counter ever falls.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from spillover.engine.requests.request import Request
from spillover.errors import GRAMMAR_REASONS
from spillover.memory.spill.report import COUNTERS, TierReport
from spillover.server.api.errors import REFUSALS
from spillover.server.engine.protocol import LiveStats
from spillover.server.telemetry.link_metrics import link_families, rank_families
from spillover.server.telemetry.speculation_metrics import SPECULATION, speculation_families, speculation_totals
from spillover.server.telemetry.tier_metrics import PREFIX, tier_families
from spillover.server.telemetry.usage import Usage
from spillover.server.telemetry.vllm_metrics import VllmNames

if TYPE_CHECKING:
    from spillover.engine.output.output_processor import Answer
    from spillover.server.engine.engine_keeper import EngineInfo

SOURCES = ("computed", "device", "host", "pool", "disk", "remote")
FINISH_REASONS = ("stop", "length", "abort", "error")
_REFUSED = "grammars_refused_"  # prefix of the totals' names, before the reason

# vLLM's bucket bounds, so that its dashboards and recording rules keep their meaning.
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
                       20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                 80.0)
LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
                   480.0, 960.0, 1920.0, 7680.0)
LENGTH_BUCKETS = (*(step * 10 ** power for power in range(6) for step in (1, 2, 5)), 1_000_000)
STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metrics:
    """All metrics of one server. `sample` is called about once per second, `observe` once per request."""

    def __init__(self, model_name: str, usage: Usage | None = None, vllm_names: bool = False) -> None:
        self.registry = CollectorRegistry()
        self.ended = TokenCounts()  # tokens of finished requests
        self.engine = EngineTotals()
        self._usage = usage
        self._model = model_name
        self._running: tuple[TokenCounts, LiveStats, EngineInfo | None] = TokenCounts(), LiveStats(), None
        self._heartbeat = (0.0, 0)  # age of the heartbeat in seconds, and number of engines that hung
        self._ready = (False, False)  # whether requests are accepted, and whether the server was told to stop

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(PREFIX + name, text, ["model_name"], registry=self.registry,
                             buckets=buckets).labels(model_name)

        self._first_token = histogram("time_to_first_token_seconds", "Time from arrival to the first token.",
                                      FIRST_TOKEN_BUCKETS)
        self._token = histogram("request_time_per_output_token_seconds",
                                "Time from the first token to the last, divided by the tokens after the first.",
                                TOKEN_BUCKETS)
        self._latency = histogram("e2e_request_latency_seconds", "Time from arrival to the last token.",
                                  LATENCY_BUCKETS)
        self._queue = histogram("request_queue_time_seconds", "Time waiting to be scheduled.", LATENCY_BUCKETS)
        self._restore = histogram("request_restore_time_seconds", "Time that KV of a request was being restored "
                                  "from lower tiers.", LATENCY_BUCKETS)
        self._prefill = histogram("request_prefill_time_seconds", "Time from being scheduled to the first token, "
                                  "without the time of restoring KV.", LATENCY_BUCKETS)
        self._decode = histogram("request_decode_time_seconds", "Time from the first token to the last.",
                                 LATENCY_BUCKETS)
        self._inference = histogram("request_inference_time_seconds", "Time from being scheduled to the last token.",
                                    LATENCY_BUCKETS)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", LENGTH_BUCKETS)
        self._output = histogram("request_generation_tokens", "Generated tokens of a request.", LENGTH_BUCKETS)
        self._computed = histogram("request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not "
                                   "found in a cache.", LENGTH_BUCKETS)
        self._n = histogram("request_params_n", "The n of a request.", (1, 2, 5, 10, 20))
        self._max_tokens = histogram("request_params_max_tokens", "The max_tokens of a request that sets it.",
                                     LENGTH_BUCKETS)
        success = Counter(PREFIX + "request_success", "Finished requests, by finish reason.",
                          ["model_name", "finished_reason"], registry=self.registry)
        self._success = {reason: success.labels(model_name, reason) for reason in FINISH_REASONS}
        self._http = Counter(PREFIX + "http_requests", "HTTP requests, by route and status.", ["route", "status"],
                             registry=self.registry)
        refused = Counter(PREFIX + "requests_refused", "Requests and connections refused for a limit or for safety.",
                          ["reason"], registry=self.registry)
        self._refused = {reason: refused.labels(reason) for reason in REFUSALS}
        self._gaps = WeightedHistogram(TOKEN_BUCKETS)
        self._step_tokens = WeightedHistogram(STEP_BUCKETS)
        self.registry.register(_Collected(self._collect))
        ProcessCollector(registry=self.registry)
        self._vllm = VllmNames(self.registry) if vllm_names else None

    def observe(self, answer: Answer, failed: bool = False) -> None:
        """Count a finished request, whatever its outcome. Latencies are only counted if it finished well."""
        self._n.observe(len(answer.requests))
        for request in answer.requests:
            self.ended.add(request)
            self._success["error" if failed and request.finish_reason is None else finish_reason(request)].inc()
            self._prompt.observe(request.num_prompt)
            if request.params.max_tokens is not None:
                self._max_tokens.observe(request.params.max_tokens)
            if request.sources is not None:
                self._computed.observe(request.sources.computed)
            if request.finish_reason in ("stop", "length") and request.finished:
                self._observe_times(request)

    def count_http(self, route: str, status: int) -> None:
        self._http.labels(route, str(status)).inc()

    def count_refusal(self, reason: str) -> None:
        self._refused[reason].inc()

    def sample(self, stats: LiveStats, info: EngineInfo | None) -> None:
        """Add the engine's totals; the steps between two samples all count with their mean number of tokens."""
        before = self.engine.values
        after = self.engine.update(stats, info.started if info is not None else 0.0)
        steps = after["steps"] - before["steps"]
        if steps > 0:
            self._step_tokens.add((after["step_tokens"] - before["step_tokens"]) / steps, steps)

    def render(self, stats: LiveStats, info: EngineInfo | None, running: TokenCounts, heartbeat_age: float = 0.0,
               hangs: int = 0, ready: bool = False, draining: bool = False) -> bytes:
        """Return the text that Prometheus scrapes. `running` has the tokens so far of unfinished requests."""
        self._ready = ready, draining
        self.sample(stats, info)
        self._heartbeat = heartbeat_age, hangs
        self._running = running, stats, info
        text = generate_latest(self.registry)
        return text if self._vllm is None else text + generate_latest(self._vllm)

    def _observe_times(self, request: Request) -> None:
        times, gaps = request.timings, len(request.token_ids) - request.num_prompt - 1
        self._latency.observe(request.finished - request.arrived)
        self._output.observe(gaps + 1)
        if not request.first_token:
            return
        self._first_token.observe(request.first_token - request.arrived)
        self._queue.observe(times.queue)
        self._restore.observe(times.restore)
        self._prefill.observe(times.prefill)
        self._decode.observe(times.decode)
        self._inference.observe(request.finished - request.scheduled)
        if gaps > 0:
            self._token.observe(times.decode / gaps)
            self._gaps.add(times.decode / gaps, gaps)

    # Metrics computed at each scrape

    def _collect(self) -> Iterator[Metric]:
        running, stats, info = self._running
        tokens = self.ended.plus(running)
        totals = self.engine.values
        yield self._gauge("num_requests_running", "Requests in the running batch.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests waiting to be scheduled.", stats.num_waiting)
        yield self._gauge("engine_sleeping", "1 while the engine sleeps.", int(stats.sleeping))
        ready, draining = self._ready
        yield self._gauge("engine_ready", "1 while the server accepts requests.", int(ready))
        yield self._gauge("server_draining", "1 after the server received the signal to stop.", int(draining))
        yield self._counter("prompt_tokens", "Prompt tokens of requests that were scheduled.", tokens.prompt)
        yield self._counter("generation_tokens", "Tokens generated.", tokens.output)
        yield self._counter("prompt_tokens_cached", "Prompt tokens that were found in a cache.",
                            tokens.prompt - tokens.sources["computed"])
        by_source = CounterMetricFamily(PREFIX + "prompt_tokens_by_source", "Prompt tokens by where they came from.",
                                        labels=["model_name", "source"])
        for source in SOURCES:
            by_source.add_metric([self._model, source], tokens.sources[source])
        yield by_source
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", totals["prefix_queries"])
        yield self._counter("prefix_cache_hits", "Tokens found in the prefix cache.", totals["prefix_hits"])
        yield from tier_families(self._model, self.engine.tiers, info.plan.slot_bytes if info is not None else 0,
                                 totals["prefix_queries"], totals["prefix_hits"])
        yield from link_families(self._model, stats.link, stats.host_pool)
        yield from rank_families(self._model, stats.ranks)
        yield self._counter("num_preemptions", "Preemptions: times that a running request lost its blocks.",
                            totals["preemptions"])
        yield self._counter("kv_evictions", "Cached blocks that were evicted.", totals["evictions"])
        yield self._counter("engine_steps", "Steps of the engine.", totals["steps"])
        yield self._counter("engine_restarts", "Engine processes that died and were restarted.",
                            info.restarts if info is not None else 0)
        age, hangs = self._heartbeat
        yield self._gauge("engine_heartbeat_age_seconds", "Time since the engine's last heartbeat.", age)
        yield self._counter("engine_hangs", "Engine processes that were killed because they hung.", hangs)
        yield self._gaps.family("inter_token_latency_seconds", "Time between two tokens of a request; every gap "
                                "counts as the mean gap of its request.", self._model)
        yield self._step_tokens.family("iteration_tokens_total", "Tokens computed in a step; every step counts as the "
                                       "mean step of its second.", self._model)
        if info is not None and info.config.speculation is not None:
            yield from speculation_families(self._model, info.config.speculation, totals)
        yield from self._grammars(stats)
        yield from self._memory(stats, info)
        if self._usage is not None:
            yield from self._usage.families()

    def _grammars(self, stats: LiveStats) -> Iterator[Metric]:
        totals = self.engine.values
        yield self._counter("grammars_compiled", "Grammars of structured output that were compiled.",
                            totals["grammars_compiled"])
        yield self._counter("grammars_reused", "Requests whose grammar was already compiled.",
                            totals["grammars_reused"])
        refused = CounterMetricFamily(PREFIX + "grammars_refused", "Requests whose grammar was refused, by reason: too "
                                      "large, not valid, over --grammar-timeout or --grammar-memory.",
                                      labels=["model_name", "reason"])
        for reason in GRAMMAR_REASONS:
            refused.add_metric([self._model, reason], totals[_REFUSED + reason])
        yield refused
        yield self._gauge("grammar_cache_bytes", "Memory of compiled grammars kept for reuse.", stats.grammar_bytes)

    def _memory(self, stats: LiveStats, info: EngineInfo | None) -> Iterator[Metric]:
        usage = GaugeMetricFamily(PREFIX + "kv_cache_usage_perc", "Share of KV blocks that requests hold, 0 to 1; "
                                  "of a lower tier, share of blocks that hold KV.",
                                  labels=["model_name", "tier"])
        usage.add_metric([self._model, "device"], stats.kv_usage)
        blocks = GaugeMetricFamily(PREFIX + "kv_blocks", "KV blocks by tier and state.",
                                   labels=["model_name", "tier", "state"])
        for state in ("free", "evictable", "protected", "in_flight"):
            blocks.add_metric([self._model, "device", state], getattr(stats, f"blocks_{state}"))
        for report in stats.kv_tiers:
            blocks.add_metric([self._model, report.name, "evictable"], report.blocks)
            if report.capacity_blocks is not None:
                blocks.add_metric([self._model, report.name, "free"], report.capacity_blocks - report.blocks)
                usage.add_metric([self._model, report.name], report.blocks / max(1, report.capacity_blocks))
        tiers = GaugeMetricFamily(PREFIX + "tier_bytes", "Memory of a tier by what it holds.",
                                  labels=["model_name", "tier", "use"])
        for tier in stats.tiers:
            tiers.add_metric([self._model, tier.name, "weights"], tier.weight_bytes)
            tiers.add_metric([self._model, tier.name, "kv"], tier.kv_bytes)
        yield from (usage, blocks, tiers)
        placement = info.plan.placement if info is not None else None
        if placement is not None:
            for name, text in EngineTotals.WEIGHTS.items():
                yield self._counter(name, text, self.engine.values[name])
            if placement.predicted is not None:
                yield self._gauge("predicted_decode_tokens_per_second", "Decode speed of one request by the plan, at "
                                  "best and with uniform routing.", placement.predicted.decode_tokens_per_second)
                yield self._gauge("predicted_prefill_tokens_per_second", "Prefill speed of 512 tokens by the plan, "
                                  "at best and with uniform routing.",
                                  placement.predicted.prefill_tokens_per_second)
        if info is not None:
            cache_dtype = info.plan.dtype if info.plan.kv_cache_dtype == "auto" else info.plan.kv_cache_dtype
            facts = {"block_size": info.plan.block_size, "num_gpu_blocks": info.plan.num_blocks,
                     "cache_dtype": cache_dtype, "enable_prefix_caching": info.config.enable_prefix_caching}
            family = GaugeMetricFamily(PREFIX + "cache_config_info", "Configuration of the KV cache.",
                                       labels=["model_name", *facts])
            family.add_metric([self._model, *map(str, facts.values())], 1)
            yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family


@dataclass
class TokenCounts:
    """Token counts of some requests. The sources always add up to the prompt."""

    prompt: int = 0
    output: int = 0
    sources: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))

    def add(self, request: Request) -> None:
        self.output += len(request.token_ids) - request.num_prompt
        if request.sources is not None:  # the request was scheduled
            self.prompt += request.num_prompt
            for source in SOURCES:
                self.sources[source] += getattr(request.sources, source)

    def plus(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(self.prompt + other.prompt, self.output + other.output,
                           {source: self.sources[source] + other.sources[source] for source in SOURCES})

    @classmethod
    def of(cls, requests: Iterable[Request]) -> TokenCounts:
        counts = cls()
        for request in requests:
            counts.add(request)
        return counts


class EngineTotals:
    """The totals of an engine process, summed over all engine processes since the server's start."""

    WEIGHTS: ClassVar[dict[str, str]] = {
        "weight_bytes_moved": "Bytes of weights copied to the device.",
        "weight_disk_bytes": "Bytes of weights read from disk for copies to the device.",
        "expert_hits": "Experts that steps needed and found on the device.",
        "expert_misses": "Experts that had to be copied to the device.",
        "expert_hosted": "Experts that the host computed instead.",
        "weight_bytes_back": "Bytes of weights in managed memory that were sent back to the host.",
        "weight_faults": "Pages of managed memory moved by page faults, where these are counted.",
    }
    NAMES = ("steps", "preemptions", "prefix_queries", "prefix_hits", "evictions", "step_tokens", *WEIGHTS,
             "grammars_compiled", "grammars_reused", *(_REFUSED + reason for reason in GRAMMAR_REASONS))
    NAMES += SPECULATION

    def __init__(self) -> None:
        self.values = dict.fromkeys(self.NAMES, 0)
        self._seen = dict.fromkeys(self.NAMES, 0)  # totals of the current engine
        self._before = dict.fromkeys(self.NAMES, 0)  # totals of earlier engines
        self.tiers: tuple[TierReport, ...] = ()  # current reports, with totals over all engines
        self._tiers_seen: dict[tuple[str, str], float] = {}
        self._tiers_before: dict[tuple[str, str], float] = {}
        self._started = 0.0

    def update(self, stats: LiveStats, started: float) -> dict[str, int]:
        """Apply the engine's stats. `started`: when this engine became ready; older stats are of the previous one."""
        seen = {name: getattr(stats, name) for name in self.NAMES
                if name != "step_tokens" and not name.startswith(_REFUSED) and name not in SPECULATION}
        seen |= speculation_totals(stats)
        seen |= {_REFUSED + reason: stats.grammars_refused.get(reason, 0) for reason in GRAMMAR_REASONS}
        seen["step_tokens"] = stats.output_tokens + stats.sources.computed
        moved = {(tier.name, name): getattr(tier, name) for tier in stats.kv_tiers for name in COUNTERS}
        is_new = started != self._started and stats.time >= started
        if is_new or any(seen[name] < self._seen[name] for name in self.NAMES):
            self._before = dict(self.values)
            self._tiers_before = {key: self._tiers_before.get(key, 0) + self._tiers_seen.get(key, 0)
                                  for key in self._tiers_before | self._tiers_seen}
        if is_new:
            self._started = started
        self._seen, self._tiers_seen = seen, moved
        self.values = {name: self._before[name] + seen[name] for name in self.NAMES}
        self.tiers = tuple(
            replace(tier, **{name: getattr(tier, name) + self._tiers_before.get((tier.name, name), 0)
                             for name in COUNTERS}) for tier in stats.kv_tiers)
        return self.values


class WeightedHistogram:
    """A histogram that accepts many equal values at once."""

    def __init__(self, buckets: Sequence[float]) -> None:
        self._bounds = list(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def add(self, value: float, count: int) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def family(self, name: str, text: str, model: str) -> HistogramMetricFamily:
        up_to = itertools.accumulate(self._counts)
        bounds = [str(float(bound)) for bound in self._bounds] + ["+Inf"]
        family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([model], list(zip(bounds, up_to, strict=True)), self._sum)
        return family


class _Collected(Collector):
    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        return self._collect()


def finish_reason(request: Request) -> str:
    """Return one of FINISH_REASONS; "abort" for a request without one, which its client has abandoned."""
    reason = request.finish_reason or "abort"
    return reason if reason in FINISH_REASONS else "error"
