"""Plans a model in each quantisation format on this machine: its bytes, whether they fit, and how fast steps would be.

Every row is the planner's plan, for the same flags, of the checkpoint as it would be in that format; only the
checkpoint's configuration is read. A limit is the planner's roofline: the format's bytes at the measured memory rate,
FLOPs at the measured matrix rate. `SHARES` has the shares of the limit that such steps reached when measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spillover.engine.config import EngineConfig
from spillover.engine.planned import PlannedModel, plan_checkpoint
from spillover.errors import PlanError, SpilloverError
from spillover.models.quantize.scheme import KINDS
from spillover.models.quantize.view import matrices
from spillover.models.registry import read_architecture
from spillover.models.weight_specs import WeightSpecs, is_expert, kept_on
from spillover.plan.planner import Plan, with_costs
from spillover.plan.rates import Rates
from spillover.plan.roofline import Roof
from spillover.plan.shapes import model_shape

K_QUANT, K_COLUMNS = "Q4_K", 256  # the format of most downloaded GGUF files; its columns per block
FP8_MATRIX_RATE = 2.0  # FP8 matrix rate relative to bfloat16's, according to the vendors' data sheets


@dataclass(frozen=True)
class Share:
    """The share of its limit that a step was measured to reach."""

    decode: float  # share of a decode step of one request
    prefill: float | None
    source: str


# By device and format of the layers' weights: only combinations that were themselves measured.
SHARES: dict[tuple[str, str], Share] = {
    ("cuda", "numbers"): Share(0.85, 0.81, "Llama-3.1-8B in bfloat16 on an H200 (w3-llama-3.1-8b.json, "
                                           "prefill-llama-3.1-8b.json)"),
    ("cuda", "int4"): Share(0.62, 0.75, "Llama-3.1-8B in int4 on an H200 (quantized-models.json)"),
    ("cuda", "fp8"): Share(0.74, 0.53, "Llama-3.1-8B in FP8 blocks on an H200 (quantized-models.json)"),
    ("cpu", "numbers"): Share(0.73, 0.82, "SmolLM2-135M in float32 on two Xeon cores (docs/benchmarks.md)"),
    ("cpu", "Q4_1"): Share(0.73, None, "SmolLM2-135M in Q4_1 on two Xeon cores (latency.json)"),
}
# The float32 rate is no limit for products in codes on a CPU: prefill in Q4_1 reached 124% of it.
NO_LIMIT = "float32 rate, no limit"


@dataclass(frozen=True)
class Speed:
    limit: float  # tokens per second by the roofline
    bound: str
    predicted: float | None  # limit times the measured share; None if that share was not measured


@dataclass(frozen=True)
class FormatPlan:
    """The plan of a model in one format. If it is not available or cannot be planned, `why` is the reason."""

    name: str
    own: bool  # whether the checkpoint is in this format
    how: str  # the flags, or the checkpoint, to get this format with
    why: str = ""
    weight_bytes: int | None = None
    resident: bool = False  # whether all weights are on the device
    kv_tokens: int | None = None
    decode: Speed | None = None
    prefill: Speed | None = None
    source: str = ""  # source of the shares


def plan_formats(config: EngineConfig, path: Path, hf_config: Mapping[str, Any], rates: Rates) -> list[FormatPlan]:
    """Plan a model in every format, the checkpoint's own first."""
    return [_row(config, path, rates, *variant) for variant in _variants(config, path, hf_config)]


def _variants(config: EngineConfig, path: Path,
              hf_config: Mapping[str, Any]) -> Iterator[tuple[str, bool, str, EngineConfig, Mapping[str, Any]]]:
    """Yield each format's name, whether it is the checkpoint's own, how to get it, flags, and configuration."""
    codes = hf_config.get("codes") or {}
    method = (hf_config.get("quantization_config") or {}).get("quant_method")
    plain = {key: value for key, value in hf_config.items() if key not in ("codes", "quantization_config")}
    config = replace(config, quantization=None)
    own = Counter(codes.values()).most_common(1)[0][0] if codes else method
    if own is not None:
        yield own, True, "as it is", config, hf_config
    unpacked = "--weight-codes widen" if codes else "the unquantised checkpoint" if own else "as it is"
    yield "unquantised", own is None, unpacked, config, plain
    for kind in sorted(KINDS, key=("fp8", "int8", "int4").index):
        how = "the unquantised checkpoint, " if method else ""
        yield kind, False, f"{how}--quantization {kind}", replace(config, quantization=kind), plain
    if codes and own != K_QUANT:
        arch, model_config = read_architecture(plain, path)
        listed = list(matrices(arch.weight_specs(model_config)))
        if all(columns % K_COLUMNS == 0 for _, columns in listed):
            yield K_QUANT, False, "another file of the model", config, {**plain, "codes": {
                **codes, **{name: K_QUANT for name, _ in listed}}}


def _row(config: EngineConfig, path: Path, rates: Rates, name: str, own: bool, how: str, flags: EngineConfig,
         hf_config: Mapping[str, Any]) -> FormatPlan:
    try:
        planned = _planned(flags, path, hf_config)
    except SpilloverError as error:
        return FormatPlan(name, own, how, str(error))
    plan = with_costs(planned.plan, planned.model_config, planned.specs, rates)
    kept = kept_on(planned.specs, plan.device, plan.dtype)
    held = _held(kept, plan.dtype)
    share = SHARES.get((plan.device, name if held == "codes" else held))
    named = f"{name}, groups of {planned.scheme.group}" if planned.scheme and planned.scheme.group else name
    decode, prefill = _speeds(plan, held, rates, share)
    weight_bytes = model_shape(planned.model_config, kept, plan.dtype).weight_bytes
    return FormatPlan(plan.dtype if name == "unquantised" else named, own, how, "", weight_bytes,
                      plan.placement is None, plan.token_capacity, decode, prefill,
                      share.source if share is not None and plan.placement is None else "")


def _planned(config: EngineConfig, path: Path, hf_config: Mapping[str, Any]) -> PlannedModel:
    """Plan with every weight on the device; if they do not fit, with the placement that the flags allow."""
    try:
        return plan_checkpoint(replace(config, weights="resident", cpu_offload_gb=None), path, hf_config)
    except PlanError:
        if config.weights == "resident":
            raise
        return plan_checkpoint(config, path, hf_config)


def _held(specs: WeightSpecs, dtype: str) -> str:
    """Return the kind of format that most weights of the layers' linears have: "numbers", "fp8" or "codes"."""
    counts: Counter[str] = Counter()
    for part, listed in specs.items():
        for spec in listed if part.startswith("layers.") else ():
            if spec.format is not None and not is_expert(spec.name):
                first = spec.fields(dtype)[0].dtype
                held = "fp8" if first.startswith("float8") else "numbers" if "float" in first else "codes"
                counts[held] += spec.params
    return counts.most_common(1)[0][0] if counts else "numbers"


def _speeds(plan: Plan, held: str, rates: Rates, share: Share | None) -> tuple[Speed | None, Speed | None]:
    placed = plan.placement
    if placed is not None:
        found = placed.predicted
        if found is None:
            return None, None
        return (Speed(found.decode_tokens_per_second, found.decode_roof, None),
                Speed(found.prefill_tokens_per_second, found.prefill_roof, None))
    if plan.costs is None:
        return None, None
    decode, prefill = plan.costs.decode_1, plan.costs.prefill
    if held == "fp8" and plan.device == "cuda":
        prefill = _faster(prefill, rates)
    elif held == "codes" and plan.device == "cpu" and prefill.bound == "compute":
        prefill = replace(prefill, bound=NO_LIMIT)
    return (_speed(decode, None if share is None else share.decode),
            _speed(prefill, None if share is None else share.prefill))


def _speed(roof: Roof, share: float | None) -> Speed:
    limit = roof.tokens_per_second
    return Speed(limit, roof.bound, None if share is None else limit * share)


def _faster(roof: Roof, rates: Rates) -> Roof:
    """Return the roof of a step whose products are computed in FP8."""
    memory = roof.limit.bytes / rates.memory_read
    compute = roof.limit.flops / (FP8_MATRIX_RATE * rates.flops(roof.limit.dtype))
    return replace(roof, seconds=max(memory, compute), bound="memory" if memory >= compute else "compute")
