"""The predicted best speed of a placement of weights: what a step reads, moves and computes, at measured rates.

Routing is assumed to be uniform; real routing repeats itself and has more hits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spillover.plan.placement import SLOTTED, Predicted, WeightPlan
from spillover.plan.rates import Rates
from spillover.plan.roofline import Limit, step_limit
from spillover.plan.shapes import ModelShape
from spillover.plan.units import Units

CONTEXT = 512  # cached tokens of the decoding request
PROMPT = 512  # tokens of the prompt in a prefill
UNKNOWN_DISK = 1e9  # bytes per second assumed for a disk that was not measured


@dataclass(frozen=True)
class _Moves:
    """The bytes that one step moves, or that the host computes with."""

    streamed: float  # parts whose need is known in advance, and experts that move with them
    missed: float  # experts that miss
    hosted: float  # experts that the host computes
    from_disk: float  # bytes read from disk


def predict(plan: WeightPlan, units: Units, shape: ModelShape, rates: Rates, max_model_len: int,
            batched_tokens: int) -> Predicted:
    context, tokens = min(CONTEXT, max_model_len - 1), min(PROMPT, max_model_len, batched_tokens)
    hit = hit_rate(plan, units)
    decode, prefill = (_moves(plan, units, shape, hit or 0.0, count, rates) for count in (1, tokens))
    device = step_limit(shape, [(1, context)])
    # The host, not the device, reads the experts that it computes.
    device = Limit(max(0.0, device.bytes - decode.hosted), device.flops, device.dtype)
    decode_seconds, decode_time, decode_roof = _time(plan, device, decode, rates, shared=tokens_fetched(plan, 1))
    whole = step_limit(shape, [(tokens, 0)])
    prefill_seconds, prefill_time, prefill_roof = _time(plan, whole, prefill, rates, shared=False)
    return Predicted(
        decode_tokens_per_second=1 / decode_time,
        prefill_tokens_per_second=tokens / prefill_time,
        decode_roof=decode_roof,
        prefill_roof=prefill_roof,
        decode_seconds=decode_seconds,
        prefill_seconds=prefill_seconds,
        decode_moved=round(decode.streamed + decode.missed * _link_share(plan, rates)),
        decode_hosted=round(decode.hosted + decode.missed * (1 - _link_share(plan, rates))),
        prefill_moved=round(prefill.streamed + prefill.missed),
        assumed_hit_rate=hit,
        context=context,
        prefill_tokens=tokens,
    )


def predict_pass(plan: WeightPlan, units: Units, shape: ModelShape, rates: Rates, rows: int, context: int) -> float:
    """Return the seconds of a step that computes `rows` tokens of one request after `context` cached ones."""
    moves = _moves(plan, units, shape, hit_rate(plan, units) or 0.0, rows, rates)
    return _time(plan, step_limit(shape, [(rows, context)]), moves, rates, shared=False)[1]


def predict_batch(plan: WeightPlan, units: Units, shape: ModelShape, rates: Rates,
                  batch: Sequence[tuple[int, int]]) -> tuple[float, str]:
    """Return (seconds, the roof that binds) of a step. `batch`: (new tokens, cached tokens) of each request."""
    tokens = sum(new for new, _ in batch)
    moves = _moves(plan, units, shape, hit_rate(plan, units) or 0.0, tokens, rates)
    device = step_limit(shape, batch)
    device = Limit(max(0.0, device.bytes - moves.hosted), device.flops, device.dtype)
    _, seconds, bound = _time(plan, device, moves, rates, shared=tokens_fetched(plan, tokens))
    return seconds, bound


def hit_rate(plan: WeightPlan, units: Units) -> float | None:
    """Return the hit rate of experts in layers that have slots or managed pages; None if there are none."""
    if plan.managed_bytes and units.stacks:  # weights that every token uses are the most recently used, and stay
        experts = sum(units.stacks.values())
        return min(1.0, max(0, plan.device_bytes - (units.total - experts)) / experts)
    if not plan.quota:
        return None
    lasting = plan.pinned if plan.strategy == "pinned" else plan.quota
    return lasting / units.num_experts


def tokens_fetched(plan: WeightPlan, tokens: int) -> bool:
    """Return whether a step of n tokens fetches its misses itself and may let the host compute some of them."""
    return plan.strategy == "experts" and tokens <= plan.paged_tokens


def _moves(plan: WeightPlan, units: Units, shape: ModelShape, hit: float, tokens: int, rates: Rates) -> _Moves:
    streamed = missed = hosted = disk = 0.0
    for part, where in plan.parts.items():
        if where == "resident" or (where == "managed" and hit):
            continue
        count = float(units.records[part]) * (2 if units.tied and part == "embed" else 1)
        streamed += count
        disk += count if part in plan.disk_parts else 0
    requested = shape.distinct_experts(tokens) * units.record_bytes
    for layer, where in plan.experts.items():
        if where == "streamed":
            count = units.layer_record_bytes
            streamed += count
        elif where in SLOTTED or where == "managed":
            count = requested * (1 - hit)
            missed += count
        elif where == "host":
            count = requested
            # A step that is too long for the host streams them to a GPU; a CPU computes with them in place.
            if tokens <= plan.paged_tokens or rates.device == "cpu":
                hosted += count
            else:
                streamed += count
        else:
            continue
        disk += count if layer in plan.disk_experts else 0
    return _Moves(streamed, missed, hosted, disk)


def _time(plan: WeightPlan, device: Limit, moves: _Moves, rates: Rates,
          shared: bool) -> tuple[tuple[tuple[str, float], ...], float, str]:
    """Return (seconds by roof, seconds of the step, the roof that binds). `shared`: host and link share the misses."""
    link, host = _link(rates), rates.host_read or rates.memory_read
    computing = device.seconds(rates)
    bound = device.bound(rates)
    part = _link_share(plan, rates) if shared else 1.0
    fetching = moves.missed * part / (_kernel_link(rates) if shared else link)
    streaming = moves.streamed / link
    hosting = moves.hosted / host
    reading = moves.from_disk / (rates.disk_read or UNKNOWN_DISK)
    # A CPU copies with the same cores and memory that it computes with, so that nothing overlaps.
    ahead = plan.strategy in ("sequential", "experts", "host-experts", "uvm-prefetch") and rates.device == "cuda"
    if shared and ahead:  # a layer's misses are known when it is reached, and waited for
        seconds = max(computing + fetching + reading, streaming + fetching)
    elif ahead:
        seconds = max(computing + hosting, streaming + fetching, reading)
    else:
        seconds = computing + hosting + streaming + fetching + reading
    roofs = {bound: computing, "link": streaming + fetching, "host": hosting, "disk": reading}
    binding = max(roofs, key=lambda name: roofs[name])
    if shared and part < 1:
        roofs["host"] = moves.missed * (1 - part) / host
        binding = "link and host" if binding == "link" and fetching >= streaming else binding
    return tuple((name, value) for name, value in roofs.items() if value > 0), seconds, binding


def _link(rates: Rates) -> float:
    """Return the bytes per second to the device; a copy on a CPU reads and writes the same memory."""
    return rates.host_to_device or rates.memory_read / 2


def _kernel_link(rates: Rates) -> float:
    return rates.kernel_read or _link(rates)


def _link_share(plan: WeightPlan, rates: Rates) -> float:
    """Return the share of a decode step's misses that are copied over the link while the host computes the others."""
    if plan.strategy != "experts" or rates.device == "cpu" or rates.host_read is None:
        return 1.0
    return _kernel_link(rates) / (_kernel_link(rates) + rates.host_read)
