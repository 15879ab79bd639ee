"""The tables of a plan whose weights are not all on the device: placement and predicted speed."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from spillover.bench.latency import LatencyResult
from spillover.bench.table import make_table
from spillover.plan.placement import Predicted, WeightPlan
from spillover.plan.predict import UNKNOWN_DISK
from spillover.plan.rates import Rates
from spillover.plan.roofline import format_seconds
from spillover.plan.substitutes import ACCEPTED, SubstitutePlan
from spillover.units import format_bytes, format_rate


def print_predicted(console: Console, plan: WeightPlan, results: Sequence[LatencyResult]) -> None:
    """Print the plan's best case for one request next to the measurement."""
    predicted = plan.predicted
    single = next((result for result in results if result.batch_size == 1), None)
    if predicted is None or single is None:
        return
    lines = [("prefill", predicted.prefill_tokens_per_second, predicted.prefill_roof, single.input_len
              / single.first_token.median, f"{predicted.prefill_tokens} tokens predicted, {single.input_len} measured")]
    if single.token_time is not None:
        lines.append(("decode", predicted.decode_tokens_per_second, predicted.decode_roof,
                      1 / single.token_time.median, "uniform routing predicted" if plan.slots else "one request"))
    for phase, promised, roof, measured, note in lines:
        console.print(f"{phase}: the plan says {promised:,.1f} tok/s at best ({roof}), measured {measured:,.1f}, "
                      f"{measured / promised:.0%} ({note})", highlight=False)


def placement_table(plan: WeightPlan) -> Table:
    table = make_table(f"Weights, {plan.strategy}", "Unit", "Where", "Device", "Host", "Disk", text=("Where",),
                       caption=_caption(plan))
    for row in plan.rows:
        table.add_row(row.kind, row.place, *(_size(count) for count in (row.device, row.host, row.disk)))
    table.add_row("All", "", *(_size(count) for count in (plan.device_bytes, plan.host_bytes, plan.disk_bytes)),
                  style="bold")
    return table


def predicted_table(predicted: Predicted, rates: Rates | None = None) -> Table:
    """Show each step's share of the roof that binds it, and the shares of the others."""
    table = make_table("Predicted (best case)", "Step", "Time", "Rate", "Bound by", "Details",
                       text=("Bound by", "Details"), caption=_assumed(predicted, rates))

    def row(name: str, tokens: int, rate: float, roof: str, parts: tuple[tuple[str, float], ...], moved: int) -> None:
        seconds = tokens / rate
        spent = [f"{part} {100 * taken / seconds:.0f}%" for part, taken in parts]
        table.add_row(name, format_seconds(seconds), format_rate(rate, "tok/s"), roof,
                      ", ".join(spent) + (f"; {format_bytes(moved)} moved" if moved else ""))

    row(f"Decode, 1 request, {predicted.context} tokens of context", 1, predicted.decode_tokens_per_second,
        predicted.decode_roof, predicted.decode_seconds, predicted.decode_moved)
    row(f"Prefill, {predicted.prefill_tokens} tokens", predicted.prefill_tokens, predicted.prefill_tokens_per_second,
        predicted.prefill_roof, predicted.prefill_seconds, predicted.prefill_moved)
    return table


def substitute_table(plan: SubstitutePlan) -> Table:
    """Show the cost and yield of a pass that verifies a draft; without measured rates, only the bytes it moves."""
    assumed = (f"Assumed: {ACCEPTED:.0%} of every draft of {plan.num_tokens} is accepted, so that a pass brings "
               f"{plan.tokens_per_pass:.3g} tokens; how many depends on the model and the text.")
    table = make_table(f"Substitutes in {plan.dtype}", "What", "Value", "Details", text=("Details",),
                       caption=assumed if plan.tokens_per_second is not None else None)
    table.add_row("Copies on the device", format_bytes(plan.nbytes),
                  f"of {plan.layers} layers{' and the head' if plan.head else ''}")
    table.add_row("Moved by a pass", format_bytes(plan.moved), f"that verifies up to {plan.num_tokens} tokens")
    if plan.tokens_per_second is not None:
        table.add_row("Time of a pass", format_seconds(plan.pass_seconds), "at best, one request")
        table.add_row("Time to draft", format_seconds(plan.draft_seconds), "a token, at best")
        table.add_row("Rate", format_rate(plan.tokens_per_second, "tok/s"), "one request")
    return table


def _caption(plan: WeightPlan) -> str | None:
    """Return facts that the rows do not show."""
    lines = []
    if plan.quota:
        lines.append(f"Steps of up to {plan.paged_tokens} token{'s' * (plan.paged_tokens > 1)} fetch the experts they "
                     f"miss, {format_bytes(plan.record_bytes)} each; larger ones stream them.")
    elif plan.paged_tokens:
        lines.append(f"The host computes its experts in steps of up to {plan.paged_tokens} tokens; larger ones stream "
                     "them.")
    if plan.pinned:
        lines.append(f"{plan.pinned} slots of each layer keep their experts permanently.")
    if plan.spare_slots:
        lines.append(f"The KV cache may take back up to {plan.spare_slots:,} slots.")
    return " ".join(lines) or None


def _assumed(predicted: Predicted, rates: Rates | None) -> str:
    lines = []
    if predicted.assumed_hit_rate is not None:
        lines.append(f"Uniform routing is assumed: {predicted.assumed_hit_rate:.0%} of the requested experts are in a "
                     "slot; real routing repeats itself and hits more often.")
    if rates is not None and rates.disk_read is None and dict(predicted.decode_seconds).get("disk"):
        lines.append(f"The disk was not timed and is assumed to read at {format_rate(UNKNOWN_DISK, 'B/s')}.")
    if rates is not None:
        named = {"link": rates.host_to_device, "link, read by a kernel": rates.kernel_read,
                 "host memory": rates.host_read, "device memory": rates.memory_read}
        lines.append("Measured now: " + ", ".join(f"{name} {format_rate(rate, 'B/s')}" for name, rate in named.items()
                                                  if rate is not None) + ".")
    return " ".join(lines)


def _size(count: int) -> str:
    return format_bytes(count) if count else ""
