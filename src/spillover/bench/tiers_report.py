"""Tables of the KV tiers: each number with the number of measurements, each rate with that of its link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from rich.table import Table

from spillover.bench.restart import RestartResult
from spillover.bench.statistics import Ratio
from spillover.bench.table import make_table
from spillover.bench.target import SOURCES, TierTraffic
from spillover.bench.tiers import Agreement, Arm, MultiTurnResult, NoReuseResult
from spillover.units import format_bytes, format_rate

NOTHING = "-"


def no_reuse_table(results: Sequence[NoReuseResult], title: str) -> Table:
    table = make_table(title, "tiers", "output tok/s", "mean TTFT ms", "mean TPOT ms",
                       f"x {results[0].arm.name}, 95% interval", "of limit", "hit rate")
    for result in results:
        if not result.repeats:
            _not_run(table, result.arm)
            continue
        rate, sources = result.output_rate, result.sources
        table.add_row(
            result.arm.name,
            f"{rate.median:,.1f} (n={len(result.repeats)})",
            _mean_ms(result.first_tokens),
            _mean_ms(result.token_times),
            "1" if result.ratio is None else shown_ratio(result.ratio, 3),
            f"{result.limit.of_limit:.0%} {result.limit.bound.name}" if result.limit else NOTHING,
            f"{1 - sources['computed'] / max(1, sum(sources.values())):.1%}",
        )
    return table


def multi_turn_table(results: Sequence[MultiTurnResult], title: str) -> Table:
    used = [source for source in SOURCES if any(result.sources[source] for result in results if result.warm)]
    table = make_table(title, "tiers", "warm TTFT ms", "95% interval", "speed-up, 95% interval",
                       *(f"{source} tok" for source in used), "hit rate")
    for result in results:
        if not result.warm:
            _not_run(table, result.arm)
            continue
        first, sources = result.first_token, result.sources
        table.add_row(
            result.arm.name,
            f"{1e3 * first.median:,.1f} (n={len(result.warm)})",
            f"{1e3 * first.low:,.1f} .. {1e3 * first.high:,.1f}",
            "1" if result.speedup is None else shown_ratio(result.speedup, 2),
            *(f"{sources[source]:,}" for source in used),
            f"{result.hit_rate:.1%}",
        )
    return table


def traffic_table(traffic: Mapping[str, Sequence[TierTraffic]]) -> Table:
    """Return the table of bytes moved between tiers, from traffic by arm."""
    table = make_table("Traffic", "tiers", "direction", "moved", "while moving", "link", "of link", "failures")
    for arm, tiers in traffic.items():
        for tier in tiers:
            for direction, count, rate, link in tier.directions():
                table.add_row(
                    arm,
                    f"to {tier.name}" if direction == "in" else f"from {tier.name}",
                    format_bytes(count),
                    NOTHING if rate is None else format_rate(rate, "B/s"),
                    NOTHING if link is None else format_rate(link, "B/s"),
                    NOTHING if rate is None or not link else f"{rate / link:.0%}",
                    str(tier.failures),
                )
    return table


def restart_table(results: Sequence[RestartResult], title: str) -> Table:
    used = [source for source in SOURCES if any(stage.sources[source] for result in results
                                                for stage in result.stages)]
    table = make_table(title, "block", "stage", "mean TTFT ms", "tok/s", "x cold",
                       *(f"{source} tok" for source in used), "ready after", "blocks on disk", "bytes on disk",
                       "per block")
    for result in results:
        cold = result.stages[0]
        for stage in result.stages:
            ready = NOTHING if stage.ready is None else f"{stage.ready:.2f} s"
            table.add_row(
                str(result.block_size),
                stage.name,
                _mean_ms(stage.first_tokens),
                f"{stage.token_rate:,.1f}",
                f"{stage.token_rate / cold.token_rate:.2f}",
                *(f"{stage.sources[source]:,}" for source in used),
                ready,
                *((f"{result.blocks:,}", format_bytes(result.disk_bytes), format_bytes(result.bytes_per_block))
                  if stage is result.stages[-1] else ("", "", "")),
                end_section=stage is result.stages[-1],
            )
    return table


def agreement_line(agreement: Agreement) -> str:
    if agreement.different:
        return (f"Tokens DIFFER in {len(agreement.different)} of {agreement.compared} comparisons: "
                + "; ".join(agreement.different[:4]))
    return f"Same greedy tokens everywhere: {agreement.compared} answers compared, none differs"


def shown_ratio(ratio: Ratio, digits: int) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.{digits}f} (n=1)"
    return f"{ratio.value:.{digits}f} ({ratio.low:.{digits}f} .. {ratio.high:.{digits}f}, n={ratio.count})"


def _not_run(table: Table, arm: Arm) -> None:
    table.add_row(arm.name, *[NOTHING] * (len(table.columns) - 1))
    table.caption = f"{arm.name}: {arm.note}"


def _mean_ms(seconds: Sequence[float]) -> str:
    return f"{1e3 * float(np.mean(seconds)):,.1f} (n={len(seconds)})" if seconds else NOTHING
