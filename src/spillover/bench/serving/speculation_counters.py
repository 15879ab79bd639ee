"""Metrics of speculation during a run, from the server's counters: vLLM's and spillover's `spec_decode_*`.

SGLang has no such counters but two gauges of its last steps; they are used if there is nothing else, and the numbers of
tokens are unknown then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PREFIX = "spec_decode_"
_BY_POSITION = re.compile(_PREFIX + r"num_accepted_tokens_per_pos/(\d+)(?:/true|/false)?")
POSITION = "spec_acceptance_at_"  # prefix of a metric's name, followed by the position, from 1


def speculation_metrics(counters: Mapping[str, float]) -> dict[str, float]:
    """Return metrics by name; empty if nothing was drafted. `counters`: of one run, named as in `server_facts`."""
    drafts, drafted = _total(counters, "num_drafts"), _total(counters, "num_draft_tokens")
    accepted = _total(counters, "num_accepted_tokens")
    if not drafts or not drafted or accepted is None:
        return {ours: counters[theirs] for ours, theirs in (("spec_acceptance_rate", "spec_accept_rate"),
                                                            ("spec_tokens_per_pass", "spec_accept_length"))
                if counters.get(theirs)}
    metrics = {"spec_acceptance_rate": accepted / drafted, "spec_tokens_per_pass": 1 + accepted / drafts,
               "spec_drafts": drafts, "spec_verified_tokens": drafted, "spec_accepted_tokens": accepted,
               "spec_wasted_tokens": drafted - accepted}
    for ours, theirs in (("spec_proposed_tokens", "num_proposed_tokens"), ("spec_draft_ms", "draft_milliseconds"),
                         ("spec_verify_ms", "verify_milliseconds")):
        value = _total(counters, theirs)
        if value is not None:
            metrics[ours] = value
    if any(name.startswith(_PREFIX) and name.endswith("/true") and value for name, value in counters.items()):
        metrics["spec_simulated"] = 1.0
    for name, count in counters.items():
        found = _BY_POSITION.fullmatch(name)
        if found is not None:
            metrics[f"{POSITION}{int(found[1]) + 1}"] = count / drafts
    return metrics


def acceptance_by_position(metrics: Mapping[str, Any]) -> list[float]:
    """Return the share of drafts accepted up to each position, up to the last position that was ever accepted."""
    shares: list[float] = []
    while metrics.get(f"{POSITION}{len(shares) + 1}"):
        shares.append(float(metrics[f"{POSITION}{len(shares) + 1}"]))
    return shares


def _total(counters: Mapping[str, float], name: str) -> float | None:
    """Return a counter, with or without the label that marks simulated acceptance."""
    values = [counters[key] for key in (_PREFIX + name, f"{_PREFIX}{name}/false", f"{_PREFIX}{name}/true")
              if key in counters]
    return sum(values) if values else None
