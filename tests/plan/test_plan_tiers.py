"""The tiers below the device: blocks are counted with their real layout, and impossible budgets are rejected."""

from __future__ import annotations

import errno
import io
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console

from spillover.cli.plan import plan as plan_command
from spillover.errors import PlanError, SpilloverError
from spillover.memory.budgets import DiskBudget
from spillover.plan.measure import measure_disk
from spillover.plan.planner import Plan, PlanRequest, make_plan
from spillover.plan.shapes import model_shape
from spillover.plan.tiers import STAGING_BLOCKS, slot_stride, with_tier_rates
from spillover.units import parse_bytes
from support.plan_shapes import CPU, GIB, GPT_OSS, GPT_OSS_SPECS, GPU, RATES, SMOLLM2, SMOLLM2_SPECS
from support.pool_process import PoolProcess

MB = 10**6
LONG = replace(SMOLLM2, max_position=1 << 20)


def planned(machine: Any = CPU, config: Any = SMOLLM2, specs: Any = SMOLLM2_SPECS, **flags: Any) -> Plan:
    return make_plan(PlanRequest(model="SmolLM2", **flags), config, specs, machine)


def refusal(machine: Any = CPU, config: Any = SMOLLM2, **flags: Any) -> str:
    with pytest.raises(PlanError) as error:
        planned(machine, config, **flags)
    assert "\n" not in str(error.value)
    return str(error.value)


# Blocks

def test_blocks_of_every_tier(tmp_path: Path) -> None:
    disks = (DiskBudget(tmp_path, 10 * MB), DiskBudget(tmp_path / "not yet", 100 * 737280))
    plan = planned(host_memory=GIB, disks=disks, remote="redis://host:6379/0")
    assert plan.slot_bytes == plan.block_bytes == 30 * 2 * 3 * 64 * 16 * 4 == 737280
    assert [(tier.name, tier.bytes, tier.blocks) for tier in plan.tiers] == [
        ("host", GIB, GIB // plan.slot_bytes), ("disk", 10 * MB, 10 * MB // plan.slot_bytes),
        ("disk", 100 * plan.slot_bytes, 99), ("remote", None, None)]  # its headers take space too
    assert plan.host_blocks == GIB // plan.slot_bytes
    assert not (tmp_path / "not yet").exists()


def test_a_shared_pool_is_asked_for_its_size() -> None:
    with PoolProcess(100 * MB) as pool:
        plan = planned(host_pool=pool.path, remote="redis://host:6379/0")
        tier, remote = plan.tiers
        assert (tier.name, tier.place, remote.name) == ("pool", str(pool.path), "remote")
        assert tier.bytes == pool.report().capacity
        assert tier.blocks is not None
        assert 0.8 * tier.bytes <= tier.blocks * plan.slot_bytes <= tier.bytes
        assert plan.host_blocks == 0
        timed, _ = with_tier_rates(plan.tiers, "cpu", plan.slot_bytes)
        assert timed.read is not None
    (tier,) = planned(host_pool=pool.path).tiers
    assert (tier.bytes, tier.blocks) == (None, None)
    assert "`spill pool serve` starts one" in tier.note
    with PoolProcess(4 * MB) as pool:
        assert "holds no KV block; give it at least 11.2 MiB" in refusal(host_pool=pool.path)


def test_slots_begin_at_a_page() -> None:
    config = replace(SMOLLM2, num_layers=1, num_kv_heads=1, num_heads=3, head_dim=4, windows=(None,))
    plan = planned(config=config, host_memory=10 * MB)
    assert plan.slot_bytes == 512
    assert plan.host_blocks == 10 * MB // 4096


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_kv_takes_a_byte_an_element_and_a_scale_a_token(kind: str, dtype: str) -> None:
    narrow = 30 * 2 * 3 * 16 * (64 + 4)
    on_device = planned(kv_cache_dtype=kind, dtype=dtype, host_memory=GIB)
    assert (on_device.block_bytes, on_device.slot_bytes) == (narrow, narrow)
    spilled = planned(spill_dtype=kind, dtype=dtype, host_memory=GIB)
    assert spilled.slot_bytes == narrow
    assert spilled.block_bytes == planned(dtype=dtype).block_bytes > narrow
    shape = model_shape(SMOLLM2, SMOLLM2_SPECS, dtype, kv_dtype=kind)
    assert shape.block_bytes(16) == narrow


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_four_bits_below_the_device_take_half_of_eight(kind: str) -> None:
    eight, both = planned(kv_cache_dtype=kind, host_memory=GIB), planned(kv_cache_dtype=kind, spill_dtype="int4",
                                                                         host_memory=GIB)
    assert both.block_bytes == eight.block_bytes == 2 * both.slot_bytes
    assert both.host_blocks > 1.9 * eight.host_blocks
    assert planned(spill_dtype="int4", dtype="bfloat16", host_memory=GIB).slot_bytes == both.slot_bytes


def test_without_a_host_tier_a_few_slots_are_counted(tmp_path: Path) -> None:
    plan = planned(disks=(DiskBudget(tmp_path, GIB),))
    assert plan.host_blocks == 0
    assert plan.host_bytes == STAGING_BLOCKS * slot_stride(plan.slot_bytes)
    assert planned().host_bytes == 0


def test_a_budget_that_holds_no_block_is_refused(tmp_path: Path) -> None:
    assert refusal(host_memory=1000) == (
        "--host-memory of 1000 B holds no KV block; give it at least 720 KiB (737280 bytes)")
    sentence = refusal(disks=(DiskBudget(tmp_path, 1000),))
    least = int(sentence.split("(")[1].split()[0])
    assert planned(disks=(DiskBudget(tmp_path, least),)).tiers[0].blocks == 1
    refusal(disks=(DiskBudget(tmp_path, least - 1),))


def test_a_disk_smaller_than_its_budget_is_told(tmp_path: Path) -> None:
    plan = planned(disks=(DiskBudget(tmp_path / "a" / "b", 10**18),))
    assert "is free there" in plan.tiers[0].note
    assert planned(disks=(DiskBudget(tmp_path, 10 * MB),)).tiers[0].note == ""


@pytest.mark.parametrize("where", ["file", "file/kv"])
def test_a_disk_that_is_a_file_or_lies_in_one_is_refused(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / where
    assert refusal(disks=(DiskBudget(path, 100 * MB),)) == (
        f"--disk {path} cannot be used: it is a file, or inside a file; give a folder that can be written")


# Host memory and the machine

@settings(max_examples=100, deadline=None)
@given(st.integers(10 * MB, 25 * GIB), st.none() | st.integers(700 * MB, 25 * GIB), st.none() | st.integers(1, 8192))
def test_a_cpu_plan_and_its_host_tier_fit_the_same_ram(host: int, budget: int | None, length: int | None) -> None:
    try:
        plan = planned(host_memory=host, gpu_memory=budget, max_model_len=length)
    except PlanError:
        assume(False)
    assert plan.device_bytes + plan.host_bytes <= CPU.memory_available
    assert plan.total_bytes == plan.device_bytes + plan.host_bytes + plan.base_bytes
    assert plan.offloaded_blocks <= plan.host_blocks


def test_host_memory_above_the_machine() -> None:
    assert refusal(host_memory=64 * 10**9) == (
        "--host-memory is 59.7GiB but 20.0 GiB of the 24.0 GiB of RAM are available; lower it to at most 20.0GiB")
    limited = replace(GPU, memory_limit=4 * GIB, memory_available=3 * GIB)
    assert "3.0 GiB of the 4.0 GiB of RAM allowed by the cgroup" in refusal(limited, host_memory=8 * GIB)


def test_a_gpu_plan_takes_host_memory_beside_the_device() -> None:
    with_host, without = planned(GPU, host_memory=15 * GIB), planned(GPU)
    assert with_host.num_blocks == without.num_blocks
    assert with_host.total_bytes == without.total_bytes


def test_a_limit_on_pinned_memory() -> None:
    sentence = refusal(replace(GPU, pinnable=64 << 10), host_memory=GIB)
    assert "only 64.0 KiB may be pinned" in sentence
    assert "--ulimit memlock=-1" in sentence
    assert planned(replace(GPU, pinnable=64 << 10), device="cpu", host_memory=GIB).host_blocks > 0


def test_host_memory_that_leaves_too_little_for_the_model() -> None:
    sentence = refusal(host_memory=int(19.9 * GIB))
    assert "beside --host-memory" in sentence
    most = parse_bytes(sentence.split("lower --host-memory to at most ")[1])
    assert planned(host_memory=most).max_model_len >= 256
    assert "beside --host-memory 9537MiB" in refusal(host_memory=10 * 10**9, gpu_memory=15 * 10**9)
    assert "lower --host-memory to at most" in refusal(host_memory=int(19.9 * GIB), num_gpu_blocks_override=100)


# Sequences longer than the device's pool

def test_a_long_sequence_reaches_into_host_memory() -> None:
    plan = planned(config=LONG, num_gpu_blocks_override=100, max_model_len=8000, host_memory=GIB)
    assert (plan.max_model_len, plan.num_blocks, plan.blocks_per_sequence) == (8000, 100, 500)
    assert plan.offloaded_blocks == 400
    budget = planned(config=LONG, gpu_memory=800 * MB, max_model_len=16000, host_memory=GIB)
    assert budget.max_model_len == 16000
    assert 0 < budget.offloaded_blocks <= budget.host_blocks
    assert budget.device_bytes <= 800 * MB


def test_only_a_length_that_is_asked_for_does() -> None:
    plan = planned(config=LONG, num_gpu_blocks_override=100, host_memory=GIB)
    assert plan.max_model_len == 1600
    plan = planned(config=LONG, gpu_memory=800 * MB, host_memory=GIB)
    assert plan.offloaded_blocks == 0


def test_its_staging_is_part_of_the_workspace() -> None:
    flags: dict[str, Any] = {"config": LONG, "gpu_memory": 800 * MB, "host_memory": GIB}
    long, short = planned(max_model_len=16000, **flags), planned(max_model_len=100, **flags)
    assert long.workspace.staging > 1 * MB
    assert long.workspace.total > long.workspace.staging + long.workspace.logits
    assert short.workspace.staging == 0
    assert long.device_bytes <= 800 * MB


def test_windows_keep_sequences_on_the_device() -> None:
    with pytest.raises(PlanError, match="too few for a sequence"):
        planned(config=GPT_OSS, specs=GPT_OSS_SPECS, num_gpu_blocks_override=100, max_model_len=8000, host_memory=GIB)


def test_so_do_blocks_that_are_narrowed_on_their_way_out() -> None:
    flags = {"num_gpu_blocks_override": 100, "max_model_len": 8000, "host_memory": GIB}
    assert "too few for a sequence" in refusal(config=LONG, spill_dtype="int8", **flags)
    assert planned(config=LONG, kv_cache_dtype="int8", **flags).offloaded_blocks == 400


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 200), st.integers(MB, 200 * MB), st.integers(1, 1 << 15))
def test_a_length_fits_if_device_and_host_hold_it_together(blocks: int, host: int, length: int) -> None:
    assume(host >= 800_000)
    flags = {"num_gpu_blocks_override": blocks, "max_model_len": length, "host_memory": host}
    in_host = host // slot_stride(planned().block_bytes) // 16 * 16  # blocks move in groups of 16
    held = blocks + (in_host if blocks >= 16 + 32 + 1 else 0)
    try:
        plan = planned(config=LONG, **flags)
        assert plan.blocks_per_sequence <= held
    except PlanError as error:
        most = int(str(error).split("at most ")[1].split()[0].replace(",", ""))
        assert length > most == held * 16
        assert planned(config=LONG, **(flags | {"max_model_len": most})).max_model_len == most


def test_what_would_fit_with_host_memory_is_named() -> None:
    sentence = refusal(config=LONG, gpu_memory=800 * MB, max_model_len=1 << 20, host_memory=GIB)
    assert "in host memory" in sentence
    most = int(sentence.split("at most ")[1].split()[0].replace(",", ""))
    assert planned(config=LONG, gpu_memory=800 * MB, max_model_len=most, host_memory=GIB).offloaded_blocks > 1000
    refusal(config=LONG, gpu_memory=800 * MB, max_model_len=most + 1, host_memory=GIB)


# Output

def test_the_plan_shows_every_tier(tmp_path: Path) -> None:
    request = PlanRequest(host_memory=GIB, disks=(DiskBudget(tmp_path / "kv", GIB),), gpu_memory=GIB,
                          remote="redis://me:secret@far:6379/0", spill_dtype="fp8")
    plan = make_plan(request, SMOLLM2, SMOLLM2_SPECS, CPU, RATES)
    plan = replace(plan, tiers=with_tier_rates(plan.tiers, "cpu", plan.slot_bytes))
    console = Console(file=io.StringIO(), width=150)
    plan_command.print_plan(console, plan, RATES)
    page = console.file.getvalue()  # type: ignore[attr-defined]
    blocks = GIB // slot_stride(plan.slot_bytes)
    for words in ("KV tiers", f"{plan.num_blocks:,}", f"{blocks:,}", f"{blocks * 16:,}", "no limit", "fp8",
                  "redis://far:6379/0", str(tmp_path / "kv")[:40], "B/s"):
        assert words in page
    assert "secret" not in page
    assert "secret" not in json.dumps(plan_command.plan_json(plan, RATES))
    assert not (tmp_path / "kv").exists()


def test_without_tiers_the_plan_is_as_it_was() -> None:
    console = Console(file=io.StringIO(), width=150)
    plan_command.print_plan(console, planned(), RATES)
    assert "tiers" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_rates_are_measured_where_bytes_will_go(tmp_path: Path) -> None:
    plan = planned(host_memory=GIB, disks=(DiskBudget(tmp_path / "kv", GIB),), remote="redis://a")
    host, disk, remote = with_tier_rates(plan.tiers, "cpu", plan.slot_bytes)
    for rate in (host.write, host.read, disk.write, disk.read):
        assert rate is not None
        assert 1e6 < rate < 1e13
    assert remote.read is None
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_be_written_has_no_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_: Any) -> None:
        raise OSError(errno.EROFS, "read-only")

    plan = planned(disks=(DiskBudget(tmp_path, GIB),))
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refused)
    with pytest.raises(SpilloverError, match="cannot be written"):
        measure_disk(tmp_path)
    assert with_tier_rates(plan.tiers, "cpu", plan.slot_bytes)[0].read is None


def test_a_remote_store_with_a_size() -> None:
    plan = planned(remote="redis://host:6379/0?size=1GB&ttl=60")
    assert plan.tiers[0].bytes == 10**9
    assert plan.tiers[0].blocks == 10**9 // (plan.slot_bytes + 256)
    assert plan.tiers[0].place == "redis://host:6379/0"
    assert "holds no KV block" in refusal(remote="redis://host?size=1000")
