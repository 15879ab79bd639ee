"""The router's Prometheus metrics, under `spillover:router_`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from spillover.cluster.fleet import Fleet
from spillover.cluster.mirror import IndexState
from spillover.cluster.predict import queue_seconds

PREFIX = "spillover:router_"
_DECISION = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
            80.0)
_RATIO = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)


class Scaler(Protocol):
    target: int  # target number of replicas


class RouterMetrics:
    def __init__(self, fleet: Fleet, clock: Callable[[], float], scaler: Scaler | None = None) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(PREFIX + "requests", "Requests by the replica that answered and by status.",
                                ["replica", "status"], registry=self._registry)
        self.retries = Counter(PREFIX + "retries", "Requests retried on another replica before their first token, "
                               "by reason.",
                               ["reason"], registry=self._registry)
        self.refused = Counter(PREFIX + "refused", "Requests not sent to any replica, by reason.", ["reason"],
                               registry=self._registry)
        self.broken = Counter(PREFIX + "broken_streams", "Answers that a replica interrupted.", ["replica"],
                              registry=self._registry)
        self.cached = Counter(PREFIX + "cached_tokens", "Prompt tokens that the router expected in a cache, and "
                              "those that answers reported as cached.", ["replica", "by"], registry=self._registry)
        self.remote_prefills = Counter(PREFIX + "remote_prefills", "Prompts that a replica was to compute for "
                                       "another, by outcome.", ["replica", "outcome"], registry=self._registry)
        self.decision = Histogram(PREFIX + "decision_seconds", "Time to choose a replica for a prompt's tokens.",
                                  buckets=_DECISION, registry=self._registry)
        self.prepare = Histogram(PREFIX + "prepare_seconds", "Time to read a request and make its block keys.",
                                 buckets=_SECONDS, registry=self._registry)
        self.first = Histogram(PREFIX + "time_to_first_token_seconds", "Time from arrival to the first bytes of the "
                               "answer.", buckets=_SECONDS, registry=self._registry)
        self.error = Histogram(PREFIX + "first_token_ratio", "Time to the first token divided by the predicted one.",
                               buckets=_RATIO, registry=self._registry)
        self._registry.register(_FleetCollector(fleet, clock, scaler))

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _FleetCollector:
    def __init__(self, fleet: Fleet, clock: Callable[[], float], scaler: Scaler | None) -> None:
        self._fleet = fleet
        self._clock = clock
        self._scaler = scaler

    def collect(self) -> Iterator[Metric]:
        fleet, now = self._fleet, self._clock()
        state = GaugeMetricFamily(PREFIX + "index_state", "1 for the way the router knows a replica's blocks: exact "
                                  "(all of its KV events), degraded (some are missing), fallback (a guess).",
                                  labels=["replica", "state"])
        gauges = {name: GaugeMetricFamily(PREFIX + name, text, labels=["replica"]) for name, text in (
            ("replica_ready", "1 if the replica answers and accepts requests."),
            ("replica_draining", "1 if the replica is drained and gets no new requests."),
            ("replica_breaker_open", "1 if too many recent requests to the replica failed."),
            ("in_flight", "Requests sent to the replica that have not finished."),
            ("waiting", "Requests sent to the replica that have no token yet."),
            ("backlog_seconds", "Predicted time of the work queued at the replica."),
            ("prefill_tokens_per_second", "Rate at which the replica computes prompts."))}
        for replica in fleet.replicas:
            for each in IndexState:
                state.add_metric([replica.name, each.value], float(fleet.state(replica) is each))
            values = (replica.ready, replica.draining, replica.breaker.is_open, len(replica.flights), replica.waiting,
                      replica.backlog(now), 1 / replica.token_seconds)
            for gauge, value in zip(gauges.values(), values, strict=True):
                gauge.add_metric([replica.name], float(value))
        yield state
        yield from gauges.values()
        yield CounterMetricFamily(PREFIX + "prompt_tokens", "Prompt tokens of all requests.", fleet.prompt_tokens)
        yield CounterMetricFamily(PREFIX + "reusable_tokens", "Prompt tokens in blocks that an earlier request had: "
                                  "the most that caches can hit.", fleet.reusable_tokens)
        busy = GaugeMetricFamily(PREFIX + "busy_perc", "Share of time that replicas compute prompts, 0 to 1.")
        busy.add_metric([], fleet.busy(now))
        yield busy
        usable = [queue_seconds(replica.load(now)) for replica in fleet.replicas if replica.usable(now)]
        wait = GaugeMetricFamily(PREFIX + "predicted_wait_seconds", "Predicted wait of a request, averaged over the "
                                 "replicas that accept one; the value to scale by.")
        wait.add_metric([], sum(usable) / len(usable) if usable else 0.0)
        yield wait
        if self._scaler is not None:
            target = GaugeMetricFamily(PREFIX + "target_replicas", "Number of replicas that the load needs.")
            target.add_metric([], self._scaler.target)
            yield target
