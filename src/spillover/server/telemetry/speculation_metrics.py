"""Speculation metrics for Prometheus and the page: vLLM's counters, wasted tokens, and the time taken.

Simulated values are marked as such: in a label of every metric, and next to every number of the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from spillover.engine.output.outputs import DraftCounts
from spillover.engine.speculation.config import MOST_TOKENS, SpeculativeConfig
from spillover.server.engine.protocol import LiveStats
from spillover.server.telemetry.tier_metrics import PREFIX

_ACCEPTED = "draft_tokens_accepted_at_"  # prefix of the totals' names, before the position
SPECULATION = ("drafts", "draft_tokens", "draft_tokens_accepted", "draft_tokens_proposed", "draft_milliseconds",
               "verify_milliseconds", "branches", "branches_accepted",
               *(_ACCEPTED + str(position) for position in range(MOST_TOKENS)))  # totals
_COUNTERS = (  # name of the metric, name of its total, help text
    ("num_drafts", "drafts", "Passes that verified a draft."),
    ("num_draft_tokens", "draft_tokens", "Tokens that were drafted and verified."),
    ("num_accepted_tokens", "draft_tokens_accepted", "Drafted tokens that the model sampled as well."),
    ("num_proposed_tokens", "draft_tokens_proposed", "Tokens that drafters proposed, verified or not."),
    ("draft_milliseconds", "draft_milliseconds", "Time that drafters took."),
    ("verify_milliseconds", "verify_milliseconds", "Time of steps that verified drafts."),
    ("num_branches", "branches", "Branches of drafts that were verified."),
    ("num_accepted_branches", "branches_accepted", "Branches that replaced the rest of their draft."),
)


def speculation_totals(stats: LiveStats) -> dict[str, int]:
    """Return an engine's totals, by the names of SPECULATION."""
    counts = stats.drafts
    accepted = counts.by_position + (0,) * (MOST_TOKENS - len(counts.by_position))
    return {"drafts": counts.drafts, "draft_tokens": counts.tokens, "draft_tokens_accepted": counts.accepted,
            "draft_tokens_proposed": stats.draft_proposed, "draft_milliseconds": int(1000 * stats.draft_seconds),
            "verify_milliseconds": int(1000 * stats.verify_seconds),
            "branches": stats.branches, "branches_accepted": stats.branches_accepted,
            **{_ACCEPTED + str(position): count for position, count in enumerate(accepted)}}


def speculation_families(model: str, config: SpeculativeConfig, totals: Mapping[str, int]) -> Iterator[Metric]:
    """Yield vLLM's counters under our prefix, and our own metrics."""
    counts, labels = _counts(config, totals), [model, str(bool(config.simulated)).lower()]
    names = ["model_name", "simulated"]
    for name, total, text in _COUNTERS:
        family = CounterMetricFamily(f"{PREFIX}spec_decode_{name}", text, labels=names)
        family.add_metric(labels, totals[total])
        yield family
    wasted = CounterMetricFamily(PREFIX + "spec_decode_num_wasted_tokens", "Tokens that were drafted, verified and "
                                 "rejected.", labels=names)
    wasted.add_metric(labels, counts.wasted)
    yield wasted
    by_position = CounterMetricFamily(PREFIX + "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by their "
                                      "position in the draft.", labels=[*names, "position"])
    for position, accepted in enumerate(counts.by_position):
        by_position.add_metric([*labels, str(position)], accepted)
    yield by_position
    passes = GaugeMetricFamily(PREFIX + "spec_decode_tokens_per_pass", "Mean number of tokens per pass with a "
                               "draft.", labels=names)
    passes.add_metric(labels, counts.tokens_per_pass or 1.0)
    yield passes


def speculation_live(config: SpeculativeConfig | None, totals: Mapping[str, int]) -> dict[str, Any] | None:
    """Return the values for the page; None if there is no speculation."""
    if config is None:
        return None
    counts = _counts(config, totals)
    return {
        "method": config.method,
        "simulated": bool(config.simulated),
        "most_tokens": config.num_tokens,
        "drafts": counts.drafts,
        "proposed": totals["draft_tokens_proposed"],
        "verified": counts.tokens,
        "accepted": counts.accepted,
        "wasted": counts.wasted,
        "tokens_per_pass": counts.tokens_per_pass,
        "by_position": list(counts.acceptance()) if counts.drafts else [],
        "draft_seconds": totals["draft_milliseconds"] / 1e3,
        "verify_seconds": totals["verify_milliseconds"] / 1e3,
        "branches": totals["branches"],
        "branches_accepted": totals["branches_accepted"],
    }


def _counts(config: SpeculativeConfig, totals: Mapping[str, int]) -> DraftCounts:
    by_position = tuple(totals[_ACCEPTED + str(position)] for position in range(config.num_tokens))
    return DraftCounts(totals["drafts"], totals["draft_tokens"], totals["draft_tokens_accepted"], by_position)
