"""`spill plan --quantizations`: which format makes a model fit, and what each would do to its speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spillover.bench.table import make_table
from spillover.engine.config import EngineConfig
from spillover.units import format_bytes, format_rate

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
    table = make_table("Quantisations", "Format", "Weights", "On the device", "KV tokens", "Decode, 1 request", "limit",
                       "Prefill", "limit", "How", text=("On the device", "How"),
                       caption="Rates in tok/s. Limits: the format's bytes and FLOPs at rates measured now. Decode and "
                               "prefill: the limit times the share of it that was measured for such weights.")
    for row in rows:
        name = f"{row.name} (the checkpoint)" if row.own else row.name
        if row.weight_bytes is None or row.kv_tokens is None:
            table.add_row(name, "", "no", "", "", "", "", "", row.how)
            continue
        table.add_row(name, format_bytes(row.weight_bytes), "all" if row.resident else "in part",
                      f"{row.kv_tokens:,}", *_speed(row.decode), *_speed(row.prefill), row.how,
                      style=None if row.resident else "dim")
    return table


def notes(rows: Sequence[FormatPlan]) -> list[str]:
    """Return where measured shares are from, and why a format cannot be had."""
    named: dict[str, list[str]] = {}
    for row in rows:
        if row.source:
            named.setdefault(row.source, []).append(row.name)
    said = [f"Share of the limit, {'; '.join(names)}: {source}." for source, names in named.items()]
    unmeasured = [row.name for row in rows if row.weight_bytes is not None and row.resident and not row.source]
    if unmeasured:
        said.append(f"No share was measured of {'; '.join(unmeasured)}: only the limit is known.")
    return said + [f"{row.name}: {row.why}" for row in rows if row.why]


def _speed(speed: Speed | None) -> tuple[str, str]:
    if speed is None:
        return "", ""
    predicted = "" if speed.predicted is None else format_rate(speed.predicted, "").strip()
    return predicted, f"{format_rate(speed.limit, '').strip()} ({speed.bound})"
