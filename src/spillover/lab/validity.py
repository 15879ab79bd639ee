"""Checks of whether a run is valid. Every gate detects one way in which a result can mislead, and reports it.

A `Fault` without a metric removes all verdicts of its arm; one with a metric removes that metric's. A fault that is not
`fatal` is only reported. Gates of one run get a `Sample`; gates of an arm (`across`) get all of its visits and the
baseline's. Limits and switches are set by name in an experiment's `gates:`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from spillover.bench.records import RequestRecord, Run
from spillover.bench.statistics import student_quantile
from spillover.errors import SpilloverError, did_you_mean


@dataclass(frozen=True)
class Gates:
    """The gates and their limits. Each field is a gate; its value is its limit, False turns it off."""

    cold_start: float | bool = 3.0  # maximum ratio of the first request's time to others'
    client_saturated: float | bool = 0.9  # maximum share of time for which a client's event loop may be busy
    rate: float | bool = 0.02  # maximum relative deviation of the sending rate
    contamination: float | bool = 0.01  # maximum share of prompt tokens that are hits beyond the workload's own sharing
    lengths: float | bool = 0.01  # maximum relative deviation of the sum of output tokens
    samples: float | bool = 5  # minimum number of values beyond a percentile
    drift: float | bool = 0.10  # maximum change of the ratio to the baseline over the experiment
    errors: float | bool = 0  # maximum number of failed requests
    offload: float | bool = 1.0  # minimum ratio of the working set to the device's pool
    unequal: float | bool = 0.02  # maximum relative difference in tokens from the baseline
    version: float | bool = 0  # engine versions may not differ within an arm

    @classmethod
    def parse(cls, given: Mapping[str, Any], where: str = "gates") -> Gates:
        if not isinstance(given, Mapping):
            raise SpilloverError(f"{where}: gates must hold gates and their limits, such as {{drift: 0.2}}; got "
                                 f"{given!r}")
        names = {item.name.replace("_", "-"): item.name for item in fields(cls)}
        chosen: dict[str, Any] = {}
        for key, value in given.items():
            name = str(key).replace("_", "-")
            if name not in names:
                raise SpilloverError(f"{where}: there is no gate '{key}'{did_you_mean(name, names, listed=True)}")
            if not isinstance(value, int | float) or math.isnan(value):
                raise SpilloverError(f"{where}: gate '{name}' takes a limit or false; got '{value}'")
            if value is not True:  # true means the default limit
                chosen[names[name]] = value
        return cls(**chosen)

    def to_json(self) -> dict[str, float | bool]:
        return {name.replace("_", "-"): value for name, value in asdict(self).items()}

    def limit(self, gate: str) -> float | None:
        """Return the limit of a gate; None if it is turned off."""
        value = getattr(self, gate.replace("-", "_"))
        return None if value is False else float(value)


@dataclass(frozen=True)
class Fault:
    gate: str
    reason: str
    value: float | None = None
    limit: float | None = None
    metric: str | None = None  # None for the whole run
    fatal: bool = True
    transient: bool = False  # whether other load on the machine can cause it: the run may be repeated

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Fault:
        return cls(**value)


@dataclass(frozen=True)
class Sample:
    """A run and the facts needed to judge it. Unknown facts are None, and their gate reports that."""

    run: Run
    warmups: int  # number of requests that the server had answered before
    metrics: Sequence[str] = ()  # metrics that will have verdicts
    sharing: float | None = None  # share of prompt tokens that an unbounded prefix cache could serve
    working_set: int | None = None  # tokens
    pool: int | None = None  # tokens of KV that the device holds
    offload: bool = False  # whether the workload must exceed the pool

    @property
    def completed(self) -> Sequence[RequestRecord]:
        return self.run.completed


HIT_COUNTERS = (("prefix_hits", "prefix_queries"), ("prefix_cache_hits", "prefix_cache_queries"))
COLD_SECONDS = 0.05  # least delay of a first request that counts: less is noise of the machine
SHARED = 0.1  # share of prompt tokens above which it must be known which request computes a prefix
RunGate = Callable[[Sample, float], Fault | None]


def judge(sample: Sample, gates: Gates) -> list[Fault]:
    """Return all faults of one run."""
    found: list[Fault] = []
    for name, gate in RUN_GATES.items():
        limit = gates.limit(name)
        if limit is not None:
            fault = gate(sample, limit)
            if fault is not None:
                found.append(replace(fault, gate=name, limit=limit if fault.limit is None else fault.limit))
    if gates.limit("samples") is not None:
        found += too_few_samples(sample, gates.limit("samples") or 0.0)
    return found


def errors(sample: Sample, limit: float) -> Fault | None:
    failed = sample.run.failed
    if not sample.run.records:
        return Fault("errors", "no request was sent")
    if len(failed) <= limit:
        return None
    return Fault("errors", f"{len(failed)} of {len(sample.run.records)} requests failed: {failed[0].error}",
                 len(failed))


def cold_start(sample: Sample, limit: float) -> Fault | None:
    """Compare the first request with similar ones (the same turn): its delay must also be large for its work."""
    if sample.warmups < 1:
        return Fault("cold-start", "the server had not answered any request before, so that its first ones include "
                                   "start-up costs; set warmups", 0)
    done = sorted((record for record in sample.completed if record.chunks), key=lambda record: record.sent)
    if len(done) < 4:
        return None
    first, peers = done[0], [record for record in done[1:] if record.turn == done[0].turn]
    if len(peers) < 3 or (first.sources is None and (sample.sharing or 0.0) > SHARED):
        return None  # the first request computes prefixes that others hit: that alone is no cold start
    wait, usual = _first_token(first), float(np.median([_first_token(record) for record in peers]))
    per_token = wait / _work(first)
    usual_per_token = float(np.median([_first_token(record) / _work(record) for record in peers]))
    if wait - usual < COLD_SECONDS or wait <= limit * usual or per_token <= limit * usual_per_token:
        return None
    return Fault("cold-start", f"the first request waited {1e3 * wait:.0f} ms for its first token, others like it "
                               f"{1e3 * usual:.0f} ms: the run contains a cold start", wait / usual, transient=True)


def client_saturated(sample: Sample, limit: float) -> Fault | None:
    client = sample.run.client
    if client.saturated is not None:
        return Fault("client-saturated", f"the client did not keep up: {client.saturated}", client.busy,
                     transient=True)
    if client.busy > limit:
        return Fault("client-saturated", f"the client's event loop was busy {client.busy:.0%} of the time: it, not the "
                                         "server, may be what was measured; use more --client-processes", client.busy,
                     transient=True)
    return None


def rate(sample: Sample, limit: float) -> Fault | None:
    """Compare the times at which requests were sent with their schedule and with the requested rate."""
    details = sample.run.details
    sent = [record for record in sample.run.records if record.turn == 0]  # later turns wait for an answer
    if len(sent) < 2 or details.get("arrival") in (None, "closed", "burst"):
        return None
    scheduled, delivered = (_rate([getattr(record, name) for record in sent]) for name in ("scheduled", "sent"))
    if not scheduled or not delivered:
        return None
    off = delivered / scheduled - 1
    if abs(off) > limit:
        return Fault("rate", f"requests were sent at {delivered:.3g}/s where {scheduled:.3g}/s was scheduled", abs(off),
                     transient=True)
    rate = details.get("request_rate")
    if details["arrival"] in ("trace", "ramp-up") or rate in (None, "inf"):
        return None
    # A random schedule of few requests misses its own rate: up to four standard errors count as chance.
    chance = 4 * _arrival_spread(details) / math.sqrt(len(sent))
    off = delivered / float(rate) - 1
    if abs(off) > limit + chance:
        return Fault("rate", f"requests were sent at {delivered:.3g}/s where {float(rate):.3g}/s was requested",
                     abs(off), limit + chance)
    return None


def contamination(sample: Sample, limit: float) -> Fault | None:
    """Find contamination: hits beyond what the workload shares within itself, which come from earlier runs."""
    hits, prompt = cache_hits(sample.run)
    if hits is None or prompt <= 0:
        return Fault("contamination", "the server does not report prefix hits: only fresh prompts ensure that runs do "
                                      "not reuse each other's prompts", fatal=False)
    if sample.sharing is None:
        return None
    # Some caches match tokens, not blocks of 16, and templates are shared: up to a block per request is not counted.
    slack = min(hits, 16.0 * len(sample.completed)) / prompt
    beyond = hits / prompt - sample.sharing
    if beyond <= limit + slack:
        return None
    return Fault("contamination", f"{hits / prompt:.0%} of prompt tokens were prefix hits, but the workload shares "
                                  f"{sample.sharing:.0%} with itself: the cache held prompts of an earlier run", beyond,
                 limit + slack)


def lengths(sample: Sample, limit: float) -> Fault | None:
    """Find wrong output lengths; if an end-of-sequence token may end an answer, only too long ones."""
    done = sample.completed
    requested = sum(record.requested_output_len for record in done)
    if not requested:
        return None
    exact = sample.run.details.get("ignore_eos", True)
    wrong = [record for record in done if (record.output_tokens != record.requested_output_len if exact
                                           else record.output_tokens > record.requested_output_len)]
    missed = sum(abs(record.output_tokens - record.requested_output_len) for record in wrong) / requested
    if missed <= limit:
        return None
    return Fault("lengths", f"{len(wrong)} of {len(done)} answers do not have the requested length: "
                            f"{sum(record.output_tokens for record in done):,} tokens instead of {requested:,}", missed)


def offload(sample: Sample, limit: float) -> Fault | None:
    if not sample.offload:
        return None
    if sample.working_set is None or sample.pool is None:
        return Fault("offload", "it is unknown whether the working set exceeds the device's pool: "
                     + ("the engine does not say how large its pool is" if sample.pool is None
                        else "the workload does not say how large its working set is"), fatal=False)
    if sample.working_set > limit * sample.pool:
        return None
    return Fault("offload", f"the working set is {sample.working_set:,} tokens and the device holds {sample.pool:,}: "
                            "it fits, so that nothing had to be offloaded", sample.working_set / max(1, sample.pool))


def too_few_samples(sample: Sample, least: float) -> list[Fault]:
    """Find percentiles with too few values beyond them, which depend on single requests; one fault per metric."""
    requests = len(sample.completed)
    return few_samples(sample.metrics, requests, sum(max(0, each.output_tokens - 1) for each in sample.completed),
                       least)


def few_samples(metrics: Sequence[str], requests: int, gaps: int, least: float) -> list[Fault]:
    """Find percentiles with too few samples. `gaps`: number of gaps between tokens, over all requests."""
    found = []
    for metric in metrics:
        share = _beyond(metric)
        if share is None:
            continue
        count, what = (gaps, "gaps between tokens") if "itl" in metric else (requests, "requests")
        if count * share < least:
            found.append(Fault("samples", f"{metric} rests on {count} {what} per run, and at least "
                                          f"{math.ceil(least / share)} are needed", count, least / share, metric))
    return found


RUN_GATES: dict[str, RunGate] = {
    "errors": errors,
    "cold-start": cold_start,
    "client-saturated": client_saturated,
    "rate": rate,
    "contamination": contamination,
    "lengths": lengths,
    "offload": offload,
}


# Gates of an arm, over all of its visits


@dataclass(frozen=True)
class ArmSample:
    """An arm on one workload with the baseline, pass by pass."""

    ratios: Sequence[float]  # ratios of the primary metric to the baseline, one per block
    tokens: Mapping[str, tuple[float, float]]  # by kind (input, output): (arm's, baseline's) sums over common passes
    versions: Sequence[str]


def across(sample: ArmSample, gates: Gates) -> list[Fault]:
    found = []
    for name, gate in (("drift", drift), ("unequal", unequal), ("version", version)):
        limit = gates.limit(name)
        fault = gate(sample, limit) if limit is not None else None
        if fault is not None:
            found.append(replace(fault, gate=name, limit=limit))
    return found


def drift(sample: ArmSample, limit: float) -> Fault | None:
    """Find a trend of the ratio: one of the two arms became faster or slower during the measurement. Drift of both
    cancels in the ratio; a trend that chance explains does not count."""
    count = len(sample.ratios)
    if count < 4 or any(ratio <= 0 for ratio in sample.ratios):
        return None
    logs = np.log(np.asarray(sample.ratios, dtype=float))
    at = np.arange(count) - (count - 1) / 2
    slope = float((at * logs).sum() / (at**2).sum())
    rest = logs - logs.mean() - slope * at
    error = math.sqrt(float((rest**2).sum()) / (count - 2) / float((at**2).sum()))
    change = math.expm1(abs(slope) * (count - 1))
    if change <= limit or abs(slope) <= student_quantile(0.995, count - 2) * error:
        return None
    return Fault("drift", f"the ratio to the baseline changed by {change:.0%} from the first block to the last: the "
                          "arms drifted apart while they were measured", change)


def unequal(sample: ArmSample, limit: float) -> Fault | None:
    for what, (mine, base) in sample.tokens.items():
        if base > 0 and abs(mine / base - 1) > limit:
            return Fault("unequal", f"it handled {mine:,.0f} {what} tokens and the baseline {base:,.0f} in the same "
                                    "passes: they did not do the same work", abs(mine / base - 1))
    return None


def version(sample: ArmSample, _limit: float) -> Fault | None:
    seen = list(dict.fromkeys(sample.versions))
    if len(seen) <= 1:
        return None
    return Fault("version", f"the engine changed during the experiment: {' and '.join(seen)}", len(seen))


# Quantities that gates measure


def cache_hits(run: Run) -> tuple[float | None, float]:
    """Return (prompt tokens found in a cache, all prompt tokens); (None, 0.0) if neither is reported."""
    records = [record for record in run.completed if record.sources is not None]
    if records:
        prompt = sum(sum((record.sources or {}).values()) for record in records)
        return float(prompt - sum((record.sources or {}).get("computed", 0) for record in records)), float(prompt)
    for hits, queries in HIT_COUNTERS:
        if hits in run.counters and run.counters.get(queries):
            return run.counters[hits], run.counters[queries]
    return None, 0.0


def _first_token(record: RequestRecord) -> float:
    return record.chunks[0][0] - record.sent


def _work(record: RequestRecord) -> float:
    """Return the number of prompt tokens that had to be computed, as far as the server reports it."""
    sources = record.sources
    return max(1.0, float(record.prompt_tokens if sources is None else sources.get("computed", record.prompt_tokens)))


def _rate(times: Sequence[float]) -> float:
    span = max(times) - min(times)
    return (len(times) - 1) / span if span > 0 else 0.0


def _arrival_spread(details: Mapping[str, Any]) -> float:
    """Return the standard deviation of the gaps between arrivals over their mean."""
    burstiness = details.get("burstiness")
    return 1.0 if burstiness is None else 0.0 if burstiness == "inf" else 1 / math.sqrt(float(burstiness))


def _beyond(metric: str) -> float | None:
    """Return the share of values beyond a percentile; None for means and rates, whose interval shows their noise."""
    if metric.startswith("median_"):
        return 0.5
    found = re.match(r"p(\d+(?:\.\d+)?)_", metric)
    return None if found is None else max(1e-9, min(float(found[1]), 100 - float(found[1])) / 100)
