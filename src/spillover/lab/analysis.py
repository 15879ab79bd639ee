"""Analysis of runs: the contents of `analysis.json` with its verdicts, and whether more blocks are needed. Only reads
results; nothing is measured here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spillover.bench.statistics import block_ratios, median_interval
from spillover.bench.target import PHASES
from spillover.lab.experiment import LAYOUT, ORDERS
from spillover.lab.store import Results, read_json
from spillover.lab.validity import ArmSample, Fault, Gates, across
from spillover.lab.verdict import DECIDED, Comparison, Rule, Verdict, decide

RESAMPLES = 400  # bootstrap samples for intervals that are only displayed
MAX_DISTURBED = 0.2  # maximum share of an arm's runs that other load may disturb, retries included, until it is invalid


def analysis_of(results: Results) -> Mapping[str, Any]:
    """Read the saved analysis, or compute it from the results if there is none."""
    path = results.path / "analysis.json"
    found: Mapping[str, Any] = read_json(path) if path.exists() else analyse(results)
    return found


def analyse(results: Results) -> dict[str, Any]:
    experiment = results.experiment
    cells = _cells(results)
    judged = _all_judged(results, cells, _gates(results))
    verdicts = decide(_comparisons(results, cells, judged, experiment["metrics"]), _rule(results))
    stopped = stop(results)
    return {
        "layout": LAYOUT, "name": experiment["name"], "complete": stopped.reason is not None,
        "stopped": {"reason": stopped.reason, "text": stopped.text}, "blocks": stopped.blocks,
        "visits_done": sum(len(cell.visits) for cell in cells.values() if cell.status != "skipped"),
        "headline": [verdict.text for verdict in verdicts if verdict.comparison.primary],
        "family": _family(verdicts, experiment["confidence"]),
        "cells": [_cell_json(cell, judged[key]) for key, cell in cells.items()],
        "verdicts": [verdict.to_json() for verdict in verdicts],
    }


@dataclass(frozen=True)
class Stop:
    """Whether and why an experiment has stopped. `verdicts`: the current ones of the primary metric."""

    blocks: int  # number of complete blocks
    verdicts: tuple[Verdict, ...]
    reason: str | None  # "decided", "answered", "max-blocks" or "time-limit"; None if not stopped

    @property
    def undecided(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if not verdict.final]

    @property
    def text(self) -> str:
        blocks, left = f"{self.blocks} block{'s' * (self.blocks != 1)}", len(self.undecided)
        open_ = f"{left} comparison{'s' * (left != 1)} undecided"
        if self.reason == "max-blocks":
            return f"Stopped at its limit of {blocks} with {open_}; a larger --max-blocks continues from here."
        if self.reason == "time-limit":
            return (f"Stopped at the time limit after {blocks} with {open_}; the same command continues from here for "
                    "the same time.")
        if self.reason == "answered":
            return (f"Stopped after {blocks}: the given question is decided; of the comparisons by the "
                    f"primary metric {left} {'is' if left == 1 else 'are'} not.")
        if self.reason is None:
            return f"Not finished: {blocks} done. The same command continues from here."
        if not self.blocks:
            return "Nothing was run: no arm can be run on this machine."
        if not self.verdicts:
            return f"Stopped after {blocks}: there is nothing to compare."
        if all(verdict.verdict in DECIDED for verdict in self.verdicts):
            return f"Stopped after {blocks}: every comparison of the primary metric is decided."
        return f"Stopped after {blocks}: every comparison of the primary metric is decided, or its arm is not valid."


def stop(results: Results) -> Stop:
    """Return whether to stop after a block. An arm that drifts or is disturbed by other load is measured further."""
    experiment, cells = results.experiment, _cells(results)
    judged = _all_judged(results, cells, replace(_gates(results), drift=False), rare=0.5)
    verdicts = tuple(decide(_comparisons(results, cells, judged, [experiment["primary"]]), _rule(results)))
    size = ORDERS[experiment["order"]]
    counts = [len(cell.visits) // size for cell in cells.values() if cell.status != "skipped"]
    blocks = min(counts, default=0)
    reason = None
    if not counts or (blocks >= experiment["minimum_blocks"] and all(verdict.final for verdict in verdicts)):
        reason = "decided"
    elif blocks >= experiment["max_blocks"]:
        reason = "max-blocks"
    elif results.sessions and results.sessions[-1].get("stopped") in ("answered", "time-limit"):
        reason = str(results.sessions[-1]["stopped"])
    return Stop(blocks, verdicts, reason)


@dataclass(frozen=True)
class _Cell:
    """One arm on one workload."""

    workload: Mapping[str, Any]
    arm: str
    record: Mapping[str, Any] | None  # contents of the arm's file
    visits: tuple[Mapping[str, Any], ...]
    planned: int
    window: str

    @classmethod
    def of(cls, results: Results, workload: Mapping[str, Any], arm: str) -> _Cell:
        visits = tuple(visit for visit in results.visits
                       if visit["arm"] == arm and visit["workload"] == workload["name"])
        window = "window_metrics" if results.experiment["window"] == "steady" else "metrics"
        return cls(workload, arm, results.arms.get(arm), visits, _passes(results), window)

    @property
    def good(self) -> list[Mapping[str, Any]]:
        return [visit for visit in self.visits if visit["status"] == "ok"]

    @property
    def status(self) -> str:
        statuses = {visit["status"] for visit in self.visits}
        if (self.record or {}).get("status") == "skipped" or statuses == {"skipped"}:
            return "skipped"
        if "failed" in statuses:
            return "failed"
        return "ok" if len(self.good) == self.planned else "incomplete"

    @property
    def reason(self) -> str | None:
        """Return the reason of a skip or a failure."""
        if self.status == "skipped" and self.record is not None and self.record.get("reason"):
            return str(self.record["reason"])
        reasons = [visit["reason"] for visit in self.visits if visit["status"] != "ok" and visit.get("reason")]
        return reasons[0] if reasons else None

    def value(self, visit: Mapping[str, Any], metric: str) -> float:
        value = (visit.get(self.window) or {}).get(metric)
        return math.nan if value is None else float(value)


def _cells(results: Results) -> dict[tuple[str, str], _Cell]:
    return {(workload["name"], arm["name"]): _Cell.of(results, workload, arm["name"])
            for workload in results.experiment["workloads"] for arm in results.experiment["arms"]}


def _all_judged(results: Results, cells: Mapping[tuple[str, str], _Cell],
                gates: Gates, rare: float = MAX_DISTURBED) -> dict[tuple[str, str], list[tuple[Fault, list[str]]]]:
    baseline = results.experiment["baseline"]
    return {key: _judged(results, cell, cells[key[0], baseline], gates, rare) for key, cell in cells.items()}


def _comparisons(results: Results, cells: Mapping[tuple[str, str], _Cell],
                 judged: Mapping[tuple[str, str], Sequence[tuple[Fault, list[str]]]],
                 metrics: Sequence[str]) -> list[Comparison]:
    experiment = results.experiment
    return [_comparison(results, cells[workload["name"], arm["name"]],
                        cells[workload["name"], experiment["baseline"]], judged, metric)
            for workload in experiment["workloads"] for arm in experiment["arms"]
            if arm["name"] != experiment["baseline"] for metric in metrics]


def _rule(results: Results) -> Rule:
    experiment = results.experiment
    return Rule(experiment["confidence"], experiment["minimum_blocks"], experiment["equivalence"])


def _gates(results: Results) -> Gates:
    return Gates.parse(results.experiment["gates"])


def _passes(results: Results) -> int:
    """Return the number of passes that have begun."""
    return 1 + max((int(visit["pass"]) for visit in results.visits), default=-1)


def _judged(results: Results, cell: _Cell, base: _Cell, gates: Gates,
            rare: float) -> list[tuple[Fault, list[str]]]:
    """Return every fault of a cell once, with the runs it was found in. Runs disturbed by other load are left out of
    the comparison (`_blocks`) and do not count against the arm while they are rare."""
    found: dict[tuple[str, str | None], tuple[Fault, list[str]]] = {}
    for visit in cell.good:
        for item in visit["faults"]:
            fault = Fault.from_json(item)
            found.setdefault((fault.gate, fault.metric), (fault, []))[1].append(visit["key"])
    for key, (fault, runs) in list(found.items()):
        if fault.fatal and fault.transient and len(runs) <= rare * len(cell.good):
            reason = f"{fault.reason} ({len(runs)} of {len(cell.good)} runs, whose blocks are left out)"
            found[key] = replace(fault, reason=reason, fatal=False), runs
    blocks = _blocks(results, cell, base)
    pairs = [pair for block in blocks for pair in block]
    if pairs:
        size = len(blocks[0])
        values, bases = (tuple(side.value(pair[which], results.experiment["primary"]) for pair in pairs)
                         for which, side in enumerate((cell, base)))
        sound = all(math.isfinite(value) and value > 0 for value in (*values, *bases))
        tokens = {what: (_sum(pairs, 0, f"total_{what}_tokens"), _sum(pairs, 1, f"total_{what}_tokens"))
                  for what in ("input", "output")}
        sample = ArmSample(block_ratios(values, bases, size) if sound and cell.arm != base.arm else (), tokens,
                           [str(visit.get("version")) for visit in cell.good if visit.get("version")])
        for fault in across(sample, gates):
            found[fault.gate, fault.metric] = fault, [visit["key"] for visit in cell.good]
    return list(found.values())


def _comparison(results: Results, cell: _Cell, base: _Cell,
                judged: Mapping[tuple[str, str], Sequence[tuple[Fault, list[str]]]], metric: str) -> Comparison:
    pairs = [pair for block in _blocks(results, cell, base) for pair in block]
    reasons = (_no_verdict_reason(side, judged[side.workload["name"], side.arm], metric) for side in (cell, base))
    no_verdict_reason = next((reason for reason in reasons if reason is not None), None)
    return Comparison(
        workload=cell.workload["name"], arm=cell.arm, baseline=base.arm, metric=metric,
        primary=metric == results.experiment["primary"], values=tuple(cell.value(mine, metric) for mine, _ in pairs),
        base=tuple(base.value(theirs, metric) for _, theirs in pairs), block=ORDERS[results.experiment["order"]],
        no_verdict_reason=no_verdict_reason)


def _no_verdict_reason(cell: _Cell, judged: Sequence[tuple[Fault, list[str]]], metric: str) -> str | None:
    """Return why there can be no verdict; a crash or a skip comes first, as it explains the rest."""
    if cell.status in ("failed", "skipped"):
        return f"{cell.arm} was skipped: {cell.reason}" if cell.status == "skipped" else f"{cell.arm}: {cell.reason}"
    reasons = [fault.reason for fault, _ in judged if fault.fatal and fault.metric in (None, metric)]
    return f"{cell.arm} is not valid: {'; '.join(reasons)}" if reasons else None


def _blocks(results: Results, cell: _Cell, base: _Cell) -> list[list[tuple[Mapping[str, Any], Mapping[str, Any]]]]:
    """Return the pairs of runs of the same pass, block by block, for complete blocks without runs that other load on
    the machine has disturbed."""
    size = ORDERS[results.experiment["order"]]
    mine, theirs = ({visit["pass"]: visit for visit in side.good if not disturbed(visit)} for side in (cell, base))
    blocks = []
    for first in range(0, _passes(results), size):
        passes = range(first, first + size)
        if all(each in mine and each in theirs for each in passes):
            blocks.append([(mine[each], theirs[each]) for each in passes])
    return blocks


def disturbed(visit: Mapping[str, Any]) -> bool:
    """Return whether other load on the machine disturbed a run, so that it is left out of comparisons."""
    return any(fault["fatal"] and fault["transient"] for fault in visit["faults"])


def _cell_json(cell: _Cell, judged: Sequence[tuple[Fault, list[str]]]) -> dict[str, Any]:
    good = cell.good
    faults = [{**fault.to_json(), "visits": keys} for fault, keys in judged]
    counts = [visit["sources"] for visit in good if visit.get("sources")]
    sources = {name: sum(each.get(name, 0) for each in counts) for name in {key for each in counts for key in each}}
    split = {name: _mean([visit["metrics"].get(f"{name}_ms") for visit in good]) for name in PHASES}
    limits = [visit["limit"] for visit in good if (visit.get("limit") or {}).get("percent") is not None]
    middle = sorted(limits, key=lambda each: float(each["percent"]))[len(limits) // 2] if limits else None
    return {
        "workload": cell.workload["name"], "group": cell.workload["group"], "sweep": cell.workload["sweep"],
        "arm": cell.arm, "status": cell.status, "reason": cell.reason,
        "valid": bool(good) and not any(fault.fatal and fault.metric is None for fault, _ in judged)
                 and cell.status in ("ok", "incomplete"),
        "faults": [fault for fault in faults if fault["fatal"]],
        "notes": [fault for fault in faults if not fault["fatal"]],
        "visits": [visit["key"] for visit in cell.visits],
        "metrics": _summaries(good, "metrics"), "window_metrics": _summaries(good, "window_metrics"),
        "sources": sources or None, "hit_rate": _mean([visit["metrics"].get("hit_rate") for visit in good]),
        "latency_split": split if any(value is not None for value in split.values()) else None,
        "limit": middle or {"percent": None, "bound": None, "text": "-"},
        "requests": sum(int(visit["metrics"].get("completed") or 0) for visit in good),
        "errors": sum(int(visit["metrics"].get("failed") or 0) for visit in good),
    }


def _summaries(visits: Sequence[Mapping[str, Any]], which: str) -> dict[str, Any]:
    summaries: dict[str, Any] = {}
    for metric in dict.fromkeys(name for visit in visits for name in visit.get(which) or {}):
        values = [visit[which].get(metric) for visit in visits]
        known = [float(value) for value in values if value is not None]
        if known:
            summaries[metric] = {**median_interval(known, resamples=RESAMPLES).as_dict(), "values": values}
    return summaries


def _family(verdicts: Sequence[Verdict], confidence: float) -> dict[str, Any]:
    decided = [verdict.comparison.primary for verdict in verdicts if verdict.why is None]
    return {"alpha": 1 - confidence, "method": "simultaneous intervals", "primary_comparisons": sum(decided),
            "secondary_comparisons": len(decided) - sum(decided)}


def _sum(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], side: int, name: str) -> float:
    return sum(float(pair[side]["metrics"].get(name) or 0) for pair in pairs)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None
