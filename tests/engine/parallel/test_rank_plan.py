"""A rank's plan: parts of the weights and of KV, shares of the machine, tiers of whole blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spillover.engine.config import EngineConfig
from spillover.engine.parallel.rank_plan import check_experts, make_shard, rank_machine, without_tiers
from spillover.engine.planned import PlannedModel, plan_model, planned_rank
from spillover.errors import SpilloverError
from spillover.models.weight_specs import kept_on, part_nbytes
from spillover.plan.hardware import CudaDevice, probe
from spillover.plan.placement import WeightPlan
from spillover.plan.planner import PlanRequest
from support import starved


def planned(folder: Path, name: str, **flags: Any) -> PlannedModel:
    return plan_model(EngineConfig(model=starved.write_config(folder, name), load_format="dummy", max_model_len=128,
                                   device="cpu", **flags))


def weight_bytes(model: PlannedModel) -> int:
    return sum(part_nbytes(listed, "float32") for listed in kept_on(model.specs, "cpu", "float32").values())


@pytest.mark.parametrize("name", list(starved.MODELS))
@pytest.mark.parametrize(("size", "experts"), [(2, False), (4, False), (4, True)])
def test_ranks_hold_the_model_once(name: str, size: int, experts: bool, tmp_path: Path) -> None:
    if experts and name == "llama":
        return
    flags = {"tensor_parallel_size": size, "enable_expert_parallel": experts}
    if (name, size) == ("qwen3-moe-fp8", 4):  # four ranks would cut blocks of 128 rows
        with pytest.raises(SpilloverError, match="within a group"):
            planned(tmp_path, name, **flags)
        return
    whole, first = weight_bytes(planned(tmp_path, name)), planned(tmp_path, name, **flags)
    ranks = [first, *(planned_rank(first.config, without_tiers(first.plan), rank) for rank in range(1, size))]
    # All ranks have norms and routers, and two of four ranks hold each KV head.
    assert whole <= sum(map(weight_bytes, ranks)) < 1.2 * whole
    assert max(map(weight_bytes, ranks)) == first.plan.weight_bytes
    assert {rank.plan.num_blocks for rank in ranks} == {first.plan.num_blocks}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("flags", [{}, {"spill_dtype": "int8"}, {"kv_cache_dtype": "fp8"}])
def test_tiers_hold_whole_blocks_within_one_budget(size: int, flags: dict[str, Any], tmp_path: Path) -> None:
    """Tiers hold whole blocks also with fewer KV heads than ranks, where a rank's part exceeds its share of a block."""
    disk = f"{tmp_path / 'kv'}:100MB"
    one, several = (planned(tmp_path, "llama", host_memory="64MB", disk=(disk,), tensor_parallel_size=count, **flags)
                    for count in (1, size))
    assert several.plan.slot_bytes == one.plan.slot_bytes
    assert several.plan.tiers == one.plan.tiers
    assert several.plan.host_bytes == one.plan.host_bytes
    assert several.plan.block_bytes * min(size, 2) == one.plan.block_bytes
    assert without_tiers(several.plan).tiers == ()


def test_more_ranks_than_devices_are_refused_in_a_sentence(tmp_path: Path) -> None:
    model = planned(tmp_path, "mixtral", tensor_parallel_size=2)
    gpu = replace(probe(), cuda=(CudaDevice(0, "card", 2**30, 2**30, (9, 0)),))
    words = "needs 2 CUDA devices, and there is 1; --ranks-share-device puts"
    with pytest.raises(SpilloverError, match=words) as refused:
        make_shard(model.config, model.model_config, PlanRequest(device="cuda"), gpu, 0)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("where", ["paged", "pinned", "demand", "host"])
def test_experts_of_one_rank_are_not_fetched_one_by_one_on_cuda(where: str, tmp_path: Path) -> None:
    model = planned(tmp_path, "mixtral", tensor_parallel_size=2, enable_expert_parallel=True)
    off_device = replace(model.plan, device="cuda", placement=WeightPlan("experts", {}, {0: "resident", 1: where}))
    with pytest.raises(SpilloverError, match="on CUDA --enable-expert-parallel needs experts that fit") as refused:
        check_experts(off_device, model.shard)
    assert "\n" not in str(refused.value)
    check_experts(off_device, replace(model.shard, expert_parallel=False))
    check_experts(replace(off_device, placement=WeightPlan("experts", {}, {0: "resident", 1: "resident"})), model.shard)


def test_ranks_share_the_machine(tmp_path: Path) -> None:
    model = planned(tmp_path, "llama", tensor_parallel_size=2)
    machine = replace(probe(), cuda=(CudaDevice(0, "card", 2**31, 2**30, (9, 0)),))
    part = rank_machine(machine, model.shard)
    assert part.memory_available == machine.memory_available // 2
    assert part.cuda[0].free == 2**29
    assert rank_machine(replace(machine, cuda=machine.cuda * 2), model.shard).cuda[0].free == 2**30
    assert any("--enable-expert-parallel has no effect" in note
               for note in planned(tmp_path, "llama", enable_expert_parallel=True).plan.notes)
