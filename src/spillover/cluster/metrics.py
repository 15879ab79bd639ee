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
        self.requests = Counter(PREFIX + "requests", "Requests by the replica that answered, and the status.",
                                ["replica", "status"], registry=self._registry)
        self.retries = Counter(PREFIX + "retries", "Requests sent to another replica before a first token, by reason.",
                               ["reason"], registry=self._registry)
        self.refused = Counter(PREFIX + "refused", "Requests not sent to any replica, by reason.", ["reason"],
                               registry=self._registry)
        self.broken = Counter(PREFIX + "broken_streams", "Answers that a replica broke off.", ["replica"],
                              registry=self._registry)
        self.cached = Counter(PREFIX + "cached_tokens", "Prompt tokens expected in a cache, and those that answers "
                              "told of.", ["replica", "by"], registry=self._registry)
        self.apart = Counter(PREFIX + "prefills_apart", "Prompts sent to a replica to compute for another, by "
                             "outcome.", ["replica", "outcome"], registry=self._registry)
        self.decision = Histogram(PREFIX + "decision_seconds", "Time to choose a replica, of known tokens.",
                                  buckets=_DECISION, registry=self._registry)
        self.prepare = Histogram(PREFIX + "prepare_seconds", "Time to read a request and make its block keys.",
                                 buckets=_SECONDS, registry=self._registry)
        self.first = Histogram(PREFIX + "time_to_first_token_seconds", "From arrival to the first bytes of an answer.",
                               buckets=_SECONDS, registry=self._registry)
        self.error = Histogram(PREFIX + "first_token_ratio", "Time to the first token over the predicted one.",
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
        state = GaugeMetricFamily(PREFIX + "index_state", "1 for how the router knows what a replica holds: exact by "
                                  "its events, degraded while some are missing, fallback by guessing.",
                                  labels=["replica", "state"])
        gauges = {name: GaugeMetricFamily(PREFIX + name, text, labels=["replica"]) for name, text in (
            ("replica_ready", "1 if the replica answers and takes requests."),
            ("replica_draining", "1 if it gets no new requests."),
            ("replica_breaker_open", "1 if it failed too many requests lately."),
            ("in_flight", "Requests sent there that have not ended."),
            ("waiting", "Of these, those without a first token."),
            ("backlog_seconds", "Predicted time of the work waiting there."),
            ("prefill_tokens_per_second", "Rate at which it computes prompts."))}
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
        yield CounterMetricFamily(PREFIX + "reusable_tokens", "Of these, those in blocks that an earlier request had: "
                                  "the most that caches can find.", fleet.reusable_tokens)
        busy = GaugeMetricFamily(PREFIX + "busy_perc", "Share of time that replicas compute prompts, 0 to 1.")
        busy.add_metric([], fleet.busy(now))
        yield busy
        usable = [queue_seconds(replica.load(now)) for replica in fleet.replicas if replica.usable(now)]
        wait = GaugeMetricFamily(PREFIX + "predicted_wait_seconds", "Predicted wait of a request, on average over the "
                                 "replicas that take one: what to scale by.")
        wait.add_metric([], sum(usable) / len(usable) if usable else 0.0)
        yield wait
        if self._scaler is not None:
            target = GaugeMetricFamily(PREFIX + "target_replicas", "Replicas that the load needs, as decided last.")
            target.add_metric([], self._scaler.target)
            yield target
