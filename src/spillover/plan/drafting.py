"""Plans that share a device between a model and its draft model, with KV for as many tokens, or its draft head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from spillover.errors import PlanError
from spillover.kernels.fields import ITEMSIZE
from spillover.models.config import ModelConfig
from spillover.models.groups import layer_groups
from spillover.models.weight_specs import WeightSpecs, kept_on, part_nbytes
from spillover.plan.fit import MIN_MODEL_LEN
from spillover.plan.hardware import Machine
from spillover.plan.planner import HeadPlan, Plan, make_plan
from spillover.plan.request import PlanRequest
from spillover.plan.workspace import workspace
from spillover.units import format_bytes

CATCH_UP_ROWS = 256  # maximum rows per step when the draft model computes KV that it is missing
PlanModel = Callable[[PlanRequest, Machine], Plan]


@dataclass(frozen=True)
class DraftSpecs:
    """A draft model whose configuration has been read."""

    name: str
    dtype: str  # as in PlanRequest
    config: ModelConfig
    specs: WeightSpecs


def plan_with_draft(request: PlanRequest, machine: Machine, plan_model: PlanModel, draft: DraftSpecs) -> Plan:
    """Plan a model and its draft model within one budget."""
    alone = plan_model(request, machine)
    groups, size = len(layer_groups(draft.config)), request.block_size
    most_len = min(alone.max_model_len, draft.config.max_position)

    def plan_draft(tokens: int, length: int) -> Plan:
        draft_request = PlanRequest(
            model=draft.name, device=alone.device, dtype=draft.dtype, block_size=size,
            max_num_seqs=alone.max_num_seqs, max_num_batched_tokens=max(CATCH_UP_ROWS, 2 * alone.max_num_seqs),
            max_model_len=length, draft_tokens=1, num_gpu_blocks_override=-(-tokens // size) * groups)
        try:
            return make_plan(draft_request, draft.config, draft.specs, machine)
        except PlanError as error:
            raise PlanError(f"the draft model does not fit: {error}") from None

    shortest = most_len if request.max_model_len is not None else min(most_len, MIN_MODEL_LEN)
    least = plan_draft(shortest, shortest)
    tokens = alone.token_capacity
    if request.num_gpu_blocks_override is None:
        room = alone.kv_bytes - least.device_weight_bytes - least.workspace_bytes
        tokens = room // (_token_bytes(alone) + _token_bytes(least))
    if tokens < shortest:
        raise PlanError(
            f"the draft model {draft.name} takes {format_bytes(least.device_bytes)} with KV for {shortest:,} tokens, "
            f"and {format_bytes(alone.kv_bytes)} are left for the KV of both beside {request.model}; choose a smaller "
            "draft model, lower --max-model-len or raise --gpu-memory")
    planned = plan_draft(tokens, min(most_len, tokens))
    plan = _plan_rest(request, machine, plan_model, alone, f"the draft model {draft.name}", planned.device_bytes)
    return replace(plan, draft=planned)


@dataclass(frozen=True)
class HeadSpecs:
    """A draft head whose configuration has been read."""

    name: str
    config: ModelConfig  # of its layer; vocab_size is its draft vocabulary
    taps: int  # number of hidden states of the model that each of its rows reads
    draft_tokens: int
    specs: WeightSpecs
    token_map_bytes: int  # bytes of its mapping from draft tokens to the model's, in addition to `specs`


def plan_with_head(request: PlanRequest, machine: Machine, plan_model: PlanModel, head: HeadSpecs) -> Plan:
    """Plan a model whose blocks have a layer for a draft head, and the head itself, within one budget."""
    alone = plan_model(request, machine)
    weights = sum(part_nbytes(listed, alone.dtype) for listed in kept_on(head.specs, alone.device,
                                                                         alone.dtype).values())
    planned = HeadPlan(head.name, weights + head.token_map_bytes, _head_workspace(head, alone))
    plan = _plan_rest(request, machine, plan_model, alone, f"the head {head.name}",
                      planned.weight_bytes + planned.workspace_bytes)
    return replace(plan, head=planned)


def _plan_rest(request: PlanRequest, machine: Machine, plan_model: PlanModel, alone: Plan, other: str,
               taken: int) -> Plan:
    """Plan a model in a budget reduced by the `taken` bytes of `other`. `alone`: its plan without `other`."""
    try:
        plan = plan_model(
            replace(request, gpu_memory=None if request.gpu_memory is None else request.gpu_memory - taken,
                    max_num_seqs=alone.max_num_seqs, max_num_batched_tokens=alone.max_num_batched_tokens),
            _without(machine, alone.device, taken))
    except PlanError as error:
        raise PlanError(f"beside {other}, which takes {format_bytes(taken)}: {error}") from None
    return replace(plan, budget_bytes=request.gpu_memory, available_bytes=alone.available_bytes)


def _head_workspace(head: HeadSpecs, plan: Plan) -> int:
    """Return a head's workspace in bytes: in the largest step, while drafting, and for hidden states between steps."""
    config, rows, size = head.config, plan.max_num_seqs, ITEMSIZE[plan.dtype]
    passes = workspace(config, plan.dtype, plan.device, True, rows, rows, plan.max_model_len)
    hidden, heads = config.hidden_size, config.num_heads + 2 * config.num_kv_heads
    # Hidden states, fused ones, the previous ones, embedded tokens, both normed and concatenated, and the product.
    row = ((head.taps + 7) * hidden + heads * config.head_dim) * size
    kept = (rows + 1) * (head.draft_tokens + 1) * hidden * size
    return passes.total + (plan.max_num_batched_tokens + plan.captured_rows) * row + kept


def _token_bytes(plan: Plan) -> int:
    return plan.block_bytes * len(plan.windows) // plan.block_size


def _without(machine: Machine, device: str, taken: int) -> Machine:
    if device == "cpu":
        return replace(machine, memory_available=machine.memory_available - taken)
    return replace(machine, cuda=(replace(machine.cuda[0], free=machine.cuda[0].free - taken), *machine.cuda[1:]))
