"""`spill plan --quantizations`: the formats in which a model fits, and the speed of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spillover.bench.table import make_table
from spillover.engine.config import EngineConfig
from spillover.units import format_bytes

if TYPE_CHECKING:
    from spillover.engine.plan_formats import FormatPlan, Speed


def run_quantizations(console: Console, config: EngineConfig, as_json: bool) -> None:
    from spillover.cli.loading import fetch
    from spillover.engine.plan_formats import plan_formats
    from spillover.models.checkpoint import read_config
    from spillover.plan.hardware import probe
    from spillover.plan.measure import measure_rates

    path = fetch(config.model)
    device = ("cuda" if probe().cuda else "cpu") if config.device == "auto" else config.device
    rates = measure_rates(device)
    rows = plan_formats(config, path, read_config(path), rates)
    if as_json:
        console.print_json(data={"model": path.name, "device": device, "gpu_memory": config.gpu_memory,
                                 "rates": asdict(rates), "quantizations": [asdict(row) for row in rows]})
        return
    budget = "what is free" if config.gpu_memory is None else f"{config.gpu_memory} (--gpu-memory)"
    console.print(f"[bold]{escape(path.name)}[/bold] on {'the GPU' if device == 'cuda' else 'the CPU'}, in {budget}")
    console.print(quantizations_table(rows))
    for sentence in notes(rows):
        console.print(sentence, markup=False, highlight=False)


def quantizations_table(rows: Sequence[FormatPlan]) -> Table:
    table = make_table("Quantisations", "Format", "Weights", "Fits", "KV tokens", "Decode", "Prefill", text=("Fits",),
                       caption="tok/s of one request, as 'predicted of limit'. Limit: the format's bytes and FLOPs at "
                               "rates measured now. Predicted: the share of it that weights of this format reached "
                               "when measured; 'at most' if there is no such measurement. *: the checkpoint's format.")
    for row in rows:
        name = f"{row.name} *" if row.own else row.name
        if row.weight_bytes is None or row.kv_tokens is None:
            table.add_row(name, "", "no", "", "", "")
            continue
        table.add_row(name, format_bytes(row.weight_bytes), "all" if row.resident else "in part",
                      f"{row.kv_tokens:,}", _speed(row.decode), _speed(row.prefill),
                      style=None if row.resident else "dim")
    return table


def notes(rows: Sequence[FormatPlan]) -> list[str]:
    """Return how to get each format, what bounds it, the sources of measured shares, and why one is unavailable."""
    from spillover.engine.plan_formats import NO_LIMIT

    lines = [f"{row.name}: {row.how}" for row in rows if row.how and not row.own]
    for what, speeds in (("Decode", [row.decode for row in rows]), ("Prefill", [row.prefill for row in rows])):
        bounds = _named((row.name, speed.bound) for row, speed in zip(rows, speeds, strict=True) if speed is not None)
        unbound = bounds.pop(NO_LIMIT, None)
        lines += [f"{what} is bound by {bound}{f': {names}' if len(bounds) > 1 or unbound else ''}." for bound, names in
                  bounds.items()]
        if unbound:
            lines.append(f"The limit of {what.lower()} is unknown, because products with codes are not float32 "
                         f"products: {unbound}.")
    shares = _named((row.name, row.source) for row in rows if row.source)
    lines += [f"Share of the limit, {names}: {source}." for source, names in shares.items()]
    unmeasured = [row.name for row in rows if row.weight_bytes is not None and row.resident and not row.source]
    if unmeasured:
        lines.append(f"No share was measured for {'; '.join(unmeasured)}: only the limit is known.")
    return lines + [f"{row.name}: {row.why}" for row in rows if row.why]


def _named(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the names that share each text, in one line per text."""
    found: dict[str, list[str]] = {}
    for name, text in pairs:
        found.setdefault(text, []).append(name)
    return {text: "; ".join(names) for text, names in found.items()}


def _speed(speed: Speed | None) -> str:
    from spillover.engine.plan_formats import NO_LIMIT

    if speed is None or speed.bound == NO_LIMIT:
        return ""
    limit = _rate(speed.limit)
    return f"at most {limit}" if speed.predicted is None else f"{_rate(speed.predicted)} of {limit}"


def _rate(value: float) -> str:
    return f"{value / 1e3:,.1f}k" if value >= 10_000 else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
