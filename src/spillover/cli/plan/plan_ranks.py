"""`spill plan --tensor-parallel-size N`, `--card` and `--link`: one card and several, by a table with its sources."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spillover.bench.table import make_table
from spillover.engine.config import EngineConfig
from spillover.plan.roofline import format_seconds
from spillover.units import format_bytes, format_rate

if TYPE_CHECKING:
    from spillover.engine.plan_ranks import RanksPlan
    from spillover.plan.ranks.steps import RankPlan


def run_plan_ranks(console: Console, config: EngineConfig, card: str | None, link: str | None, as_json: bool) -> None:
    from spillover.cli.loading import fetch
    from spillover.engine.plan_ranks import choose_setting, plan_ranks
    from spillover.plan.hardware import probe
    from spillover.plan.measure import measure_rates

    setting = choose_setting(card, link, config.device, probe(), lambda: measure_rates("cuda"))
    found = plan_ranks(config, fetch(config.model), setting)
    if as_json:
        console.print_json(data=ranks_json(found))
    else:
        print_ranks(console, found)


def print_ranks(console: Console, found: RanksPlan) -> None:
    setting, last = found.setting, found.layouts[-1]
    console.print(f"[bold]{escape(last.plan.model)}[/bold] in {last.plan.dtype} on {escape(setting.card.title)}, "
                  f"predicted", highlight=False)
    console.print(_memory_table(found))
    console.print(_steps_table(found))
    for name, why in found.refused:
        console.print(f"{name}: {why}", markup=False, highlight=False)
    console.print(_rates_table(found))
    for note in (*setting.notes, *last.plan.notes):
        console.print(f"Note: {note}.", style="yellow", markup=False, highlight=False)


def ranks_json(found: RanksPlan) -> dict[str, Any]:
    """Return all numbers; bytes of a layout are of one card unless the name says of all."""
    setting = found.setting
    return {
        "prediction": True,
        "card": asdict(setting.card),
        "link": asdict(setting.link),
        "host": asdict(setting.host),
        "rates": asdict(setting.rates),
        "measured_now": setting.measured_now,
        "sources": dict(setting.sources),
        "notes": list(setting.notes),
        "refused": dict(found.refused),
        "layouts": [_layout_json(layout) for layout in found.layouts],
    }


def _layout_json(layout: RankPlan) -> dict[str, Any]:
    plan = layout.plan
    return {
        "name": layout.name,
        "tensor_parallel_size": layout.shard.size,
        "expert_parallel": layout.shard.expert_parallel,
        "weight_bytes_of_all": layout.weight_bytes,
        "replicated_bytes_of_all": layout.replicated_bytes,
        "weight_bytes": plan.weight_bytes,
        "device_weight_bytes": plan.device_weight_bytes,
        "host_weight_bytes": plan.host_weight_bytes,
        "strategy": "resident" if plan.placement is None else plan.placement.strategy,
        "kv_bytes": plan.kv_bytes,
        "workspace_bytes": plan.workspace_bytes,
        "device_bytes": plan.device_bytes,
        "num_blocks": plan.num_blocks,
        "token_capacity": plan.token_capacity,
        "max_model_len": plan.max_model_len,
        "stream_bytes_per_second": layout.stream_rate,
        "steps": [{**asdict(step), "seconds": step.seconds, "all_reduce_share": step.share,
                   "tokens_per_second": step.tokens_per_second} for step in layout.steps],
    }


def _memory_table(found: RanksPlan) -> Table:
    table = make_table("Memory of each card", "What", *(layout.name for layout in found.layouts))

    def row(name: str, *values: str, style: str | None = None) -> None:
        table.add_row(name, *values, style=style)

    layouts, plans = found.layouts, [layout.plan for layout in found.layouts]
    row("Weights", *(format_bytes(plan.weight_bytes) for plan in plans))
    row("  on the device", *(format_bytes(plan.device_weight_bytes) for plan in plans))
    row("  in host memory", *(format_bytes(plan.host_weight_bytes) for plan in plans))
    row("  held more than once, all cards", *(format_bytes(layout.replicated_bytes) for layout in layouts))
    row("How weights are held", *("resident" if plan.placement is None else plan.placement.strategy for plan in plans))
    row("KV cache", *(format_bytes(plan.kv_bytes) for plan in plans))
    row("Workspace", *(format_bytes(plan.workspace_bytes) for plan in plans))
    row("Device tier", *(format_bytes(plan.device_bytes) for plan in plans), style="bold")
    row("KV blocks", *(f"{plan.num_blocks:,}" for plan in plans))
    row("KV tokens", *(f"{plan.token_capacity:,}" for plan in plans))
    row("--max-model-len", *(f"{plan.max_model_len:,}" for plan in plans))
    row("Streamed at most, all cards", *("" if layout.stream_rate is None else
                                         format_rate(layout.stream_rate * layout.shard.size, "B/s")
                                         for layout in layouts))
    return table


def _steps_table(found: RanksPlan) -> Table:
    table = make_table("Predicted steps (best case)", "Step", "On", "Time", "Rate", "Bound by", "All-reduce",
                       text=("On", "Bound by"), caption=(
        "All-reduce: the part of the step that ranks spend adding up, in two all-reduces a layer, one of the "
        "embedding and one gather of logits. Decode: 512 tokens of context. Not counted: launches, waits and skew "
        "between ranks. Uniform routing is assumed."))
    for name in dict.fromkeys(step.name for layout in found.layouts for step in layout.steps):
        shown = [(layout, step) for layout in found.layouts for step in layout.steps if step.name == name]
        for place, (layout, step) in enumerate(shown):
            table.add_row("" if place else name, layout.name, format_seconds(step.seconds),
                          format_rate(step.tokens_per_second, "tok/s"), step.bound,
                          f"{step.share:.0%}" if layout.shard.size > 1 else "", end_section=place == len(shown) - 1)
    return table


def _rates_table(found: RanksPlan) -> Table:
    setting, ranks = found.setting, found.layouts[-1].shard.size
    rates, link = setting.rates, setting.link
    table = make_table("Planned with", "What", "Rates", "Source", text=("Rates", "Source"))
    values = {
        setting.card.title: f"{format_bytes(setting.machine.cuda[0].total)}, memory "
                            f"{format_rate(rates.memory_read, 'B/s')}, bfloat16 "
                            f"{format_rate(rates.flops('bfloat16'), 'FLOP/s')}, host link "
                            f"{format_rate(rates.host_to_device or 0, 'B/s')}",
        link.name: ", ".join(f"{format_bytes(size)} {format_seconds(link.all_reduce(size, max(2, ranks)))}"
                             for size in (16 << 10, 512 << 10, 4 << 20, 64 << 20)) + f" on {max(2, ranks)} cards",
        setting.host.name: f"{format_rate(setting.host.socket_bandwidth, 'B/s')} for every {setting.host.socket_cards} "
                           "cards",
    }
    for name, source in setting.sources:
        table.add_row(name, values[name], source)
    return table
