"""Checks of flags against the plan: a policy that cannot be loaded is an error; notes name flags without effect, and
what a flag gives up."""

from __future__ import annotations

from spillover.engine.config import EngineConfig
from spillover.memory.policies.admission import admission_policy
from spillover.memory.policies.experts import expert_policy
from spillover.models.config import ModelConfig
from spillover.plan.planner import Plan


def check_policies(config: EngineConfig) -> None:
    """Load each policy named by a flag, even if the plan does not use it: a misspelt class is always an error."""
    expert_policy(config.policy)
    admission_policy(config.spill_admission)


def flag_notes(config: EngineConfig, model: ModelConfig, plan: Plan) -> tuple[str, ...]:
    """Return one note for each flag that was given and has no effect under this plan, and for what --fast and
    managed memory give up."""
    notes = []
    placement = plan.placement
    if config.fast and plan.device == "cuda":
        notes.append("--fast: a request's tokens may depend on the other requests in its batch, on how its prompt is "
                     "chunked and on where weights and KV are stored; without --fast they do not")
    elif plan.device == "cuda" and placement is not None and placement.strategy == "host-experts":
        notes.append("--weights host-experts streams the experts that the host's cores would compute, as their sums "
                     "round differently from the device's; --fast lets the cores compute them")
    elif config.fast:
        notes.append(f"--fast has no effect: it chooses among a GPU's kernels, and the device is {plan.device}")
    if placement is not None and placement.managed_bytes:
        if plan.device == "cpu":
            notes.append(f"--weights {placement.strategy} is emulated on a CPU, by mapping and unmapping pages of host "
                         "memory: the order and the number of page faults are meaningful, their cost is not")
        elif config.uvm_oversubscribe:
            notes.append("--uvm-oversubscribe: managed memory may be more than the card has free, and a driver in that "
                         "state can hang the machine")
    if not model.is_moe:
        reason = "the model has no experts"
    elif placement is None:
        reason = "all experts are resident on the device"
    else:
        reason = f"the plan holds weights by --weights {placement.strategy}, which pages no experts"
    if config.policy != "lru" and (placement is None or placement.strategy != "experts" or not placement.slot_layers):
        notes.append(f"--policy {config.policy} has no effect: {reason}")
    if config.paged_tokens is not None and (placement is None or not placement.experts):
        notes.append(f"--paged-tokens {config.paged_tokens} has no effect: {reason}")
    if config.schedule_policy in ("lpm", "dfs-weight") and not config.enable_prefix_caching:
        notes.append(f"--schedule-policy {config.schedule_policy} orders requests as fcfs does: without "
                     "--enable-prefix-caching there are no prefixes to match")
    if config.enable_expert_parallel and config.tensor_parallel_size == 1:
        notes.append("--enable-expert-parallel has no effect: it distributes experts over several ranks, and there is "
                     "one; --tensor-parallel-size sets their number")
    if config.graph_capture == "start" and plan.device != "cuda":
        notes.append(f"--graph-capture start has no effect: CUDA graphs need a GPU, and the device is {plan.device}")
    return tuple(notes)
