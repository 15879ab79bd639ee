"""`spill plan`: placement of everything in bytes, and the least cost of a step. No weights are read."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spillover.bench.table import make_table
from spillover.cli.loading import plan_only
from spillover.cli.plan.plan_weights import placement_table, predicted_table, substitute_table
from spillover.engine.config import EngineConfig
from spillover.plan.planner import Plan, with_costs
from spillover.plan.rates import Rates
from spillover.plan.roofline import Roof, format_seconds
from spillover.plan.tiers import with_tier_rates
from spillover.units import format_bytes, format_rate


def run_plan(console: Console, config: EngineConfig, as_json: bool) -> None:
    from spillover.plan.measure import measure_rates, quick_rates

    planned = plan_only(config)  # before anything is timed, so that an impossible plan is refused at once
    # Weights that do not fit were already placed by these rates: show the same ones, not new measurements.
    rates = (measure_rates if planned.plan.placement is None else quick_rates)(planned.plan.device)
    plan = with_costs(planned.plan, planned.model_config, planned.specs, rates)
    plan = replace(plan, tiers=with_tier_rates(plan.tiers, plan.device, plan.slot_bytes))
    if as_json:
        console.print_json(data=plan_json(plan, rates))
    else:
        print_plan(console, plan, rates)


def print_plan(console: Console, plan: Plan, rates: Rates | None = None) -> None:
    where = "this machine's RAM, as it computes on the CPU" if plan.device == "cpu" else "GPU memory"
    console.print(f"[bold]{escape(plan.model)}[/bold] in {plan.dtype} on {escape(plan.device_name)}")
    console.print(f"Device tier: {where}; {format_bytes(plan.available_bytes)} available")
    console.print(_memory_table(plan))
    if plan.placement is not None:
        console.print(placement_table(plan.placement))
    if plan.tiers:
        console.print(_tiers_table(plan))
    console.print(_limits_table(plan))
    if plan.placement is not None and plan.placement.predicted is not None:
        console.print(predicted_table(plan.placement.predicted, rates))
    elif plan.costs is not None:
        console.print(_costs_table(plan, rates))
    if plan.substitutes is not None:
        console.print(substitute_table(plan.substitutes))
    for note in plan.notes:
        console.print(f"Note: {note}.", style="yellow", markup=False, highlight=False)


def plan_json(plan: Plan, rates: Rates | None = None) -> dict[str, Any]:
    """Return every number of the plan; sizes in bytes, rates per second."""
    data = asdict(plan)
    data["weights"] = dict(plan.weights)
    data["workspace"] = asdict(plan.workspace)
    data["windows"] = list(plan.windows)
    data |= {
        "device_bytes": plan.device_bytes,
        "total_bytes": plan.total_bytes,
        "token_capacity": plan.token_capacity,
        "max_concurrency": plan.max_concurrency,
        "device_weight_bytes": plan.device_weight_bytes,
        "host_weight_bytes": plan.host_weight_bytes,
        "host_blocks": plan.host_blocks,
        "offloaded_blocks": plan.offloaded_blocks,
    }
    if plan.substitutes is not None:
        data["substitutes"] |= {"tokens_per_pass": plan.substitutes.tokens_per_pass,
                                "tokens_per_second": plan.substitutes.tokens_per_second}
    costs = plan.costs
    if costs is not None:
        data["costs"] = {
            "context": costs.context,
            "prefill_tokens": costs.prefill_tokens,
            **{name: _roof_json(getattr(costs, name)) for name in ("decode_1", "decode_16", "prefill")},
        }
    data["rates"] = None if rates is None else asdict(rates)
    return data


def _memory_table(plan: Plan) -> Table:
    table = make_table("Memory", "What", "Bytes", "Share", "Details", text=("Details",))

    def row(name: str, count: int, detail: str = "", style: str | None = None) -> None:
        table.add_row(name, format_bytes(count), f"{100 * count / plan.total_bytes:.1f}%", detail, style=style)

    away = plan.host_weight_bytes + (0 if plan.placement is None else plan.placement.disk_bytes)
    head = plan.head
    own = plan.device_weight_bytes - (0 if head is None else head.weight_bytes)
    row("Weights", own, f"of {format_bytes(plan.weight_bytes)}; see below" if away else
        _listed(plan.weights))
    blocks = f"{plan.num_blocks:,} blocks of {plan.block_size} tokens, {format_bytes(plan.block_bytes)} each, 1 dummy"
    if plan.kv_cache_dtype != "auto":
        blocks += f", {plan.kv_cache_dtype}"
    row("KV cache", plan.kv_bytes, blocks)
    row("Workspace", plan.workspace_bytes, _listed(tuple(asdict(plan.workspace).items())))
    if plan.draft is not None:
        row("Draft model", plan.draft.device_bytes, _draft_detail(plan.draft))
    if head is not None:
        row("Head that drafts", head.weight_bytes + head.workspace_bytes, f"{escape(head.name)}: weights "
            f"{format_bytes(head.weight_bytes)}, workspace {format_bytes(head.workspace_bytes)}; its KV is a layer of "
            "the blocks")
    given = "" if plan.budget_bytes is None else f"budget {format_bytes(plan.budget_bytes)} (--gpu-memory)"
    row("Device tier", plan.device_bytes, given, "bold")
    if plan.device == "cpu":
        if plan.host_weight_bytes:
            row("Weights off the device", plan.host_weight_bytes, "in the same RAM")
        if plan.host_bytes:
            row("Host tier", plan.host_bytes, "in the same RAM, allocated as it is needed")
        row("Process", plan.base_bytes, "Python, torch and what they load; not counted in the budget")
        row("Total", plan.total_bytes, "the process, once loaded", "bold")
    return table


def _draft_detail(draft: Plan) -> str:
    return (f"{escape(draft.model)} in {draft.dtype}: weights {format_bytes(draft.device_weight_bytes)}, KV "
            f"{format_bytes(draft.kv_bytes)} for {draft.token_capacity:,} tokens, workspace "
            f"{format_bytes(draft.workspace_bytes)}")


def _tiers_table(plan: Plan) -> Table:
    kind = "" if plan.spill_dtype == "auto" else f" in {plan.spill_dtype}"
    table = make_table("KV tiers", "Tier", "Bytes", "Blocks", "Tokens", "In", "Out", "Where", text=("Where",),
                       caption=f"A block below the device takes {format_bytes(plan.slot_bytes)}{kind}.")
    table.add_row("device", format_bytes(plan.kv_bytes), f"{plan.num_blocks:,}", f"{plan.token_capacity:,}", "", "",
                  escape(plan.device_name))
    for tier in plan.tiers:
        blocks, tokens = ("-", "-") if tier.blocks is None else (f"{tier.blocks:,}", f"{plan.tokens(tier.blocks):,}")
        where = escape(tier.place) + (f" [yellow]({tier.note})[/yellow]" if tier.note else "")
        table.add_row(tier.name, "no limit" if tier.bytes is None else format_bytes(tier.bytes), blocks, tokens,
                      _rate(tier.write), _rate(tier.read), where)
    return table


def _rate(value: float | None) -> str:
    return "" if value is None else format_rate(value, "B/s")


def _limits_table(plan: Plan) -> Table:
    table = make_table("Limits", "Limit", "Value", "Details", text=("Details",))
    table.add_row("--max-model-len", f"{plan.max_model_len:,}", _length_detail(plan))
    table.add_row("--max-num-seqs", f"{plan.max_num_seqs:,}", "requests per step")
    table.add_row("--max-num-batched-tokens", f"{plan.max_num_batched_tokens:,}", "tokens per step")
    table.add_row("KV cache", f"{plan.token_capacity:,}", "tokens")
    table.add_row("Concurrency", f"{plan.max_concurrency:.1f}", "sequences of --max-model-len at once")
    return table


def _length_detail(plan: Plan) -> str:
    detail = f"tokens; {plan.blocks_per_sequence:,} blocks"
    return detail if plan.offloaded_blocks == 0 else f"{detail}, {plan.offloaded_blocks:,} of them in host memory"


def _costs_table(plan: Plan, rates: Rates | None) -> Table:
    costs = plan.costs
    assert costs is not None
    caption = None
    if rates is not None:
        caption = (f"At {format_rate(rates.memory_read, 'B/s')} of memory read and "
                   f"{format_rate(rates.flops(plan.dtype), 'FLOP/s')} in matrix products, measured now.")
    table = make_table("Best case (hardware limit)", "Step", "Time", "Rate", "Bound by", text=("Bound by",),
                       caption=caption)

    def row(name: str, roof: Roof) -> None:
        table.add_row(name, format_seconds(roof.seconds), format_rate(roof.tokens_per_second, "tok/s"), roof.bound)

    row(f"Decode, 1 request, {costs.context} tokens of context", costs.decode_1)
    row(f"Decode, 16 requests, {costs.context} tokens of context each", costs.decode_16)
    row(f"Prefill, {costs.prefill_tokens} tokens", costs.prefill)
    return table


def _listed(parts: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{name} {format_bytes(count)}" for name, count in parts if count)


def _roof_json(roof: Roof) -> dict[str, Any]:
    return {
        "seconds": roof.seconds,
        "tokens_per_second": roof.tokens_per_second,
        "bound": roof.bound,
        "bytes": roof.limit.bytes,
        "flops": roof.limit.flops,
    }
