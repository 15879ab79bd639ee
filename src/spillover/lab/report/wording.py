"""Sentences and short facts of a report, the same in the page and in REPORT.md."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spillover.lab.report.data import Arm, Report, Verdict, Workload
from spillover.lab.report.metric import LATENCIES, RATES, metric, shown
from spillover.units import format_bytes

VERDICTS = ("faster", "slower", "same", "no difference shown", "no verdict")
# Hardware facts that are not useful in a report or are already among the versions.
UNSHOWN = ("memlock", "process_bytes", "python_version", "torch_version", "memory_available")


@dataclass(frozen=True)
class ShownFault:
    gate: str
    reason: str
    where: str
    fatal: bool
    log_tail: str = ""  # end of a failed server's log


def judged(report: Report) -> list[Verdict]:
    """Return the verdicts of the primary metric. Engines that are not installed are listed elsewhere; an arm that
    crashed or ran out of memory is included, because that is a result."""
    skipped = {arm.name for arm in not_installed(report)}
    return [verdict for verdict in report.primary_verdicts() if verdict.arm not in skipped]


def not_installed(report: Report) -> list[Arm]:
    return [arm for arm in report.arms if arm.status == "skipped"]


def counts(report: Report) -> list[tuple[str, int]]:
    found = Counter(verdict.verdict for verdict in judged(report))
    return [(word, found[word]) for word in VERDICTS]


def verdict_word(report: Report, verdict: str) -> str:
    """Return a verdict as displayed: "same within 2%"."""
    return f"same within {100 * float(report.plan['equivalence']):g}%" if verdict == "same" else verdict


def warnings(report: Report) -> list[str]:
    """Return warnings that a reader must see before any number."""
    made = [report.stop_text] if report.stopped != "decided" else []
    labelled = [arm for arm in report.arms if arm.label]
    if labelled:
        made.append("Not the numbers of a real model: " + ", ".join(f"{arm.name} ({arm.label})" for arm in labelled)
                    + ".")
    return made


def against(report: Report, verdict: Verdict) -> str:
    """Format two values: '412 against 220 tok/s output'."""
    cells = [report.cell(verdict.workload, name) for name in (verdict.arm, report.baseline)]
    what = metric(verdict.metric)
    values = [cell.medians.get(verdict.metric) if cell is not None else None for cell in cells]
    if values[0] is None or values[1] is None:
        return ""
    return f"{shown(values[0], what.unit)} against {shown(values[1], what.unit)} {what.unit}".rstrip()


def confidence(report: Report) -> str:
    return f"{100 * float(report.plan['confidence']):.4g}%"


def method(report: Report) -> str:
    many, margin = report.family.get("primary_comparisons") or 0, float(report.plan["equivalence"])
    together = f"all {many} intervals hold together" if many > 1 else "the interval holds"
    same = (f"; same within {100 * margin:g}%: it lies between {1 / (1 + margin):.3f}x and {1 + margin:.3f}x"
            if margin else "")
    return (f"With {confidence(report)} confidence {together}, at whichever block the experiment stops. Faster or "
            f"slower: the interval excludes 1x{same}; no difference shown: undecided. An arm that fails a gate gets no "
            "verdict.")


def faults(report: Report) -> list[ShownFault]:
    """Return each reason once, with all the places it was found in."""
    found: dict[tuple[str, str, bool], list[str]] = {}
    for cell in report.cells:
        for fault in cell.faults:
            found.setdefault((fault.gate, fault.reason, fault.fatal), []).append(f"{cell.arm} on {cell.workload}")
        if cell.status == "failed":
            found.setdefault(("crashed", cell.reason or "the engine exited", True), []).append(
                f"{cell.arm} on {cell.workload}")
    again: dict[str, list[str]] = {}
    for visit in report.visits:
        for fault in visit.retried_faults:
            again.setdefault(fault.gate, []).append(f"{visit.arm} on {visit.workload}")
    for gate, where in again.items():
        found[gate, f"{_runs(len(where))} disturbed by other load on the machine, and repeated", False] = where
    logs = {visit.reason: visit.log_tail for visit in report.visits if visit.log_tail}
    return sorted((ShownFault(gate, reason, "; ".join(dict.fromkeys(where)), fatal, logs.get(reason, ""))
                   for (gate, reason, fatal), where in found.items()), key=lambda fault: not fault.fatal)


def gates(report: Report) -> str:
    settings = report.plan.get("gates") or {}
    without = [name for name, limit in settings.items() if limit is False]
    return ", ".join(name for name in settings if name not in without) + (
        f" (switched off: {', '.join(without)})" if without else "")


def client(report: Report) -> str:
    lags = [float(visit.client["lag_p99"]) for visit in report.visits if visit.client.get("lag_p99") is not None]
    if not lags:
        return ""
    busy = max(float(visit.client.get("busy") or 0) for visit in report.visits)
    return (f"The client sent requests at most {1e3 * max(lags):.1f} ms late (p99 of the worst run) and was busy "
            f"{busy:.0%} of the time at most.")


def again(report: Report) -> str:
    return str(report.provenance.get("command") or f"spill lab run {report.name}")


def not_measured(report: Report) -> str:
    """List what was not measured: 'vllm (vllm is not installed), sglang (...)'."""
    return ", ".join(f"{arm.name} ({arm.reason or arm.status})" for arm in not_installed(report))


def load_command(report: Report, workload: Workload) -> str:
    """Return a command that sends the load of one pass; every pass has prompts of its own."""
    words = ["spill", "bench", "serve", "--base-url", "URL"]
    options = {"temperature": 0, **workload.options, "num-warmups": report.plan.get("warmups", 0)}
    for name, value in options.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, Mapping):
            words += [f"--{name}", json.dumps(value)]
        elif value is not None:
            words += [f"--{name}", ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return shlex.join(words)


def env_prefix(arm: Arm) -> str:
    return "".join(f"{name}={shlex.quote(str(value))} " for name, value in arm.env.items())


def top_facts(report: Report) -> list[tuple[str, str]]:
    hardware = report.provenance.get("hardware") or {}
    date = str(report.provenance.get("date") or "")[:16].replace("T", " ")
    facts = [("measured", date), ("on", _device(hardware)), ("document", report.seed),
             ("scale", report.scale), ("runs", f"{len(report.visits)}")]
    return [(name, value) for name, value in facts if value]


def machine_facts(report: Report) -> list[tuple[str, str]]:
    hardware, versions = report.provenance.get("hardware") or {}, report.provenance.get("versions") or {}
    facts = [(name.replace("_", " "), _plain(name, value)) for name, value in hardware.items()
             if value and name not in UNSHOWN]
    facts += [("commit", str(report.provenance["commit"])[:12])] if report.provenance.get("commit") else []
    facts += [(name, str(value)) for name, value in versions.items()]
    plan = {"order": report.plan.get("order"), "blocks": report.blocks,
            "servers restart": report.plan.get("restart"), "warm-up requests": report.plan.get("warmups")}
    facts += [(name, str(value)) for name, value in plan.items() if value is not None]
    slo = report.plan.get("slo") or {}
    return facts + ([("objectives", ", ".join(f"{name} {value:g} ms" for name, value in slo.items()))] if slo else [])


def workload_facts(workload: Workload) -> list[tuple[str, str]]:
    stats = workload.stats
    facts: list[tuple[str, str]] = []
    for key, title in (("count", "requests"), ("prompt", "prompt tokens"), ("output", "output tokens"),
                       ("total_tokens", "tokens in total"), ("sharing", "could be shared"),
                       ("working_set_tokens", "working set, tokens")):
        if key in stats and stats[key] is not None:
            facts.append((title, _stat(key, stats[key])))
    return facts


def short_facts(workload: Workload) -> str:
    return " · ".join(f"{title} {value}" for title, value in workload_facts(workload)
                      if title in ("requests", "could be shared", "working set, tokens"))


def definitions(report: Report) -> list[tuple[str, str]]:
    used = {key for cell in report.cells for key in cell.medians}
    words = [(name, about) for key, (name, about) in LATENCIES.items()
             if any(f"_{key}_ms" in one for one in used)]
    words += [(name, about) for key, (name, _, about) in RATES.items() if key in used]
    words += [
        ("steady state", "from when a tenth of the time of sending is over and as many requests run as at the median "
                         "of that time, to when the last request was due"),
        ("arm", "one of the configurations that are compared; the others are compared with the baseline"),
        ("block", "runs of all arms in turn (order abba: once in each direction); each block gives one "
                  "ratio to the baseline, so that a machine whose speed drifts changes both alike"),
        ("interval", "holds the true ratio with the confidence given, however often it is looked at: blocks are added "
                     "until it decides"),
        ("could be shared", "share of prompt tokens that an unlimited prefix cache with blocks of 16 could serve"),
        ("failed requests", "are counted and shown, and never part of an average"),
    ]
    return words


def document(report: Report) -> str:
    if not report.document:
        return ""
    try:
        import yaml
    except ImportError:
        return ""
    return str(yaml.safe_dump(dict(report.document), sort_keys=False, allow_unicode=True, width=110))


def _runs(count: int) -> str:
    return "1 run was" if count == 1 else f"{count} runs were"


def _device(hardware: Mapping[str, Any]) -> str:
    for key in ("device", "gpu", "cuda", "cpu", "processor", "name"):
        value = hardware.get(key)
        if value:
            return str(value[0] if isinstance(value, list | tuple) else value)
    return ""


def _plain(name: str, value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and any(
            word in name for word in ("memory", "bytes", "cache")):
        return format_bytes(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(str(key), one)}" for key, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(name, one) for one in value)
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _stat(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        parts = [(name, value.get(name)) for name in ("mean", "p50", "p90", "p99", "max")]
        return ", ".join(f"{name} {one:,.0f}" for name, one in parts if one is not None)
    if key == "sharing":
        return f"{float(value):.0%}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)
