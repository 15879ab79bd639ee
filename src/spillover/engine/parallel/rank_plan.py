"""The plan of one rank: the machine's budgets are divided among ranks; KV tiers store blocks of the whole model."""

from __future__ import annotations

from dataclasses import replace

from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError
from spillover.kernels.extents import MOST_RANKS
from spillover.models.config import ModelConfig
from spillover.models.sharding.shard import Shard, check_shard
from spillover.plan.hardware import Machine
from spillover.plan.placement import SLOTTED
from spillover.plan.planner import Plan, PlanRequest, device_and_dtype
from spillover.plan.tiers import host_bytes, plan_tiers


def make_shard(config: EngineConfig, model: ModelConfig, request: PlanRequest, machine: Machine, rank: int) -> Shard:
    """Return a rank's part of a model; raise SpilloverError if the model cannot be divided among the ranks."""
    size = config.tensor_parallel_size
    if size == 1:
        return Shard()
    check_shard(model, size, config.enable_expert_parallel)
    if device_and_dtype(request, model, machine)[0] == "cuda":
        _check_devices(config, size, len(machine.cuda))
    return Shard(rank, size, config.enable_expert_parallel)


def _check_devices(config: EngineConfig, size: int, devices: int) -> None:
    """Raise SpilloverError if the CUDA devices cannot serve the ranks."""
    flag = f"--tensor-parallel-size {size}"
    if size > MOST_RANKS:
        raise SpilloverError(f"{flag} is more than the {MOST_RANKS} ranks that are supported on CUDA devices")
    if size > devices and not config.ranks_share_device:
        raise SpilloverError(f"{flag} needs {size} CUDA devices, and there {'is' if devices == 1 else 'are'} {devices}"
                             "; --ranks-share-device puts several ranks on one, which is slower than one rank and of "
                             "use for tests")


def check_experts(plan: Plan, shard: Shard) -> None:
    """Raise SpilloverError if a CUDA rank with expert parallelism would have to fetch its experts one by one."""
    experts = {} if plan.placement is None else plan.placement.experts
    if shard.expert_parallel and plan.device == "cuda" and any(
            where in (*SLOTTED, "host") for where in experts.values()):
        raise SpilloverError("on CUDA --enable-expert-parallel needs experts that fit on their ranks' devices, or that "
                             "stream with their layer (--weights sequential); without it each rank fetches its part "
                             "of the experts that it needs")


def rank_request(request: PlanRequest, shard: Shard) -> PlanRequest:
    """Return the plan request of one rank: --gpu-memory is per rank, --host-memory is divided among all ranks."""
    if shard.size == 1:
        return request
    host = None if request.host_memory is None else request.host_memory // shard.size
    return replace(request, host_memory=host, ranks=shard.size)


def rank_machine(machine: Machine, shard: Shard) -> Machine:
    """Return a rank's share of the machine."""
    if shard.size == 1:
        return machine
    limit, cards = machine.memory_limit, machine.cuda
    sharing = -(-shard.size // max(1, len(cards)))  # number of ranks per device
    cards = tuple(replace(card, free=card.free // sharing) for card in cards)
    return replace(machine, cuda=cards, memory_available=machine.memory_available // shard.size,
                   memory_total=machine.memory_total // shard.size,
                   memory_limit=None if limit is None else limit // shard.size,
                   cores=max(1, machine.cores // shard.size))


def with_whole_blocks(plan: Plan, request: PlanRequest, model: ModelConfig, shard: Shard) -> Plan:
    """Return rank 0's plan with tiers for blocks of the whole model; `request`: the request of one rank."""
    if shard.size == 1 or not plan.tiers:
        return plan
    slot = plan.slot_bytes // shard.decoder(model).num_kv_heads * model.num_kv_heads
    host = next((tier.bytes for tier in plan.tiers if tier.name == "host"), None)
    tiers = plan_tiers(None if host is None else host * shard.size, request.host_pool, request.disks, request.remote,
                       slot, plan.device)
    return replace(plan, tiers=tiers, slot_bytes=slot, host_bytes=host_bytes(tiers, slot, request.spill))


def without_tiers(plan: Plan) -> Plan:
    """Return the plan of a rank other than rank 0: its blocks reach the tiers through rank 0's link."""
    return replace(plan, tiers=(), host_bytes=0, draft=None)
