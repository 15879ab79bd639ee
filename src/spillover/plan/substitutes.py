"""Substitutes: rounded copies, on the device, of streamed layers. They draft, and one pass over the streamed weights
verifies the draft. Computes their memory and predicted speed, and refuses models and plans that they do not suit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spillover.errors import PlanError
from spillover.plan.placement import WeightPlan
from spillover.plan.predict import CONTEXT, predict_pass
from spillover.plan.rates import Rates
from spillover.plan.request import PlanRequest
from spillover.plan.roofline import step_limit
from spillover.plan.shapes import ModelShape
from spillover.plan.units import Units

ACCEPTED = 0.5  # share of draft tokens assumed to be accepted for predictions; the true one depends on model and text
ALTERNATIVE = "use --speculative-method ngram or suffix"


@dataclass(frozen=True)
class SubstitutePlan:
    """The memory of substitutes, and the best speed of a pass. Seconds are 0 if no rates were measured."""

    dtype: str  # "int4" | "int8"
    layers: int
    nbytes: int
    num_tokens: int  # maximum number of draft tokens
    moved: int  # bytes that a pass copies to the device
    head: bool = False  # whether the head has a copy too, as nothing is streamed
    pass_seconds: float = 0.0  # time to verify a whole draft of one request
    draft_seconds: float = 0.0  # time to draft one token

    @property
    def tokens_per_pass(self) -> float:
        """Return the expected tokens per pass if a share ACCEPTED of every draft is accepted."""
        return 1 + ACCEPTED * self.num_tokens

    @property
    def tokens_per_second(self) -> float | None:
        seconds = self.pass_seconds + self.num_tokens * self.draft_seconds
        return self.tokens_per_pass / seconds if self.pass_seconds else None


def substitute_plan(request: PlanRequest, placement: WeightPlan | None, units: Units, shape: ModelShape,
                    rates: Rates | None, max_model_len: int) -> SubstitutePlan | None:
    """Return the plan of substitutes; None if none are requested. `placement`: None if all weights are resident."""
    if request.substitutes is None:
        return None
    streamed = [part for part in units.layers if placement is not None and placement.parts[part] != "resident"]
    copied = streamed or list(units.substitutes)
    nbytes = sum(units.substitutes[part] for part in copied)
    found = SubstitutePlan(request.substitutes, len(streamed or units.layers), nbytes, request.draft_tokens,
                           sum(units.records[part] for part in streamed), len(copied) > len(streamed or units.layers))
    if rates is None:
        return found
    context = min(CONTEXT, max_model_len - 1)
    rows = min(1 + request.draft_tokens, max_model_len - context)
    limit = step_limit(shape, [(rows, context)])
    seconds = limit.seconds(rates)
    if placement is not None:
        seconds = predict_pass(placement, units, shape, rates, rows, context)
    drafting = replace(shape, layer_bytes=shape.layer_bytes - sum(units.parts[part] for part in copied) + nbytes)
    return replace(found, pass_seconds=seconds, draft_seconds=step_limit(drafting, [(1, context)]).seconds(rates))


def check_model(request: PlanRequest, units: Units) -> None:
    """Refuse substitutes for models that they do not work for."""
    if request.substitutes is None:
        return
    if units.stacks:
        raise PlanError(f"substitutes are rounded copies of whole layers, and those of {request.model} have experts, "
                        f"each of which is fetched by itself; {ALTERNATIVE}")
    larger = next((part for part in units.layers if 4 * units.substitutes[part] > 3 * units.parts[part]), None)
    if larger is not None:
        raise PlanError(f"substitutes in {request.substitutes} would be no smaller than three quarters of the weights "
                        f"of {request.model} themselves, which are in few bits already; {ALTERNATIVE}")


def check_streams(request: PlanRequest, placement: WeightPlan | None, device: str) -> None:
    """Refuse substitutes on a GPU that holds all weights: nothing is streamed, so a copy saves nothing."""
    if request.substitutes is not None and device == "cuda" and (placement is None or placement.is_resident):
        raise PlanError(f"substitutes draft for layers that stream, and all weights of {request.model} stay on the "
                        f"device; {ALTERNATIVE}, or give less --gpu-memory")
