"""Predictions against counts made by hand: the bytes a step moves, at what rate, and which roof binds."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from spillover.cli.plan.plan import plan_json, print_plan
from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError
from spillover.models.architectures import gpt_oss
from spillover.plan.measure import quick_rates
from spillover.plan.placement import Predicted, WeightPlan
from spillover.plan.planner import Plan, PlanRequest, make_plan
from spillover.plan.rates import Rates
from spillover.plan.roofline import step_limit
from spillover.plan.shapes import model_shape
from spillover.plan.units import weight_units
from support.plan_shapes import CPU, GIB, GPT_OSS, GPU, RATES, SMOLLM2, SMOLLM2_SPECS

MB = 10**6
CARD = Rates("cuda", memory_read=1e12, float32=50e12, bfloat16=100e12, host_to_device=50e9, device_to_host=50e9,
             kernel_read=40e9, host_read=60e9)
MANY = replace(GPT_OSS, num_experts=64)
MANY_SPECS = gpt_oss.weight_specs(MANY)
SHAPE = model_shape(MANY, MANY_SPECS, "bfloat16")
UNITS = weight_units(MANY, MANY_SPECS, "bfloat16")
DEVICE = step_limit(SHAPE, [(1, 512)]).seconds(CARD)


def planned(weights: str, rates: Rates = CARD, machine: Any = GPU, **flags: Any) -> tuple[Plan, WeightPlan, Predicted]:
    plan = make_plan(PlanRequest(model="gpt-oss", gpu_memory=26 * 10**8, weights=weights, **flags), MANY, MANY_SPECS,
                     machine, rates)
    assert plan.placement is not None
    assert plan.placement.predicted is not None
    return plan, plan.placement, plan.placement.predicted


def missed(placed: WeightPlan, lasting: int) -> float:
    """Return the bytes of experts that one token misses in four layers."""
    return 4 * 4 * (1 - lasting / 64) * placed.record_bytes


def test_misses_are_shared_between_link_and_host() -> None:
    _, placed, predicted = planned("experts")
    assert predicted.assumed_hit_rate == placed.quota / 64
    both = missed(placed, placed.quota) / (40e9 + 60e9)
    assert 1 / predicted.decode_tokens_per_second == pytest.approx(DEVICE + both, rel=1e-6)
    assert predicted.decode_roof == "link and host"
    assert predicted.decode_moved == pytest.approx(0.4 * missed(placed, placed.quota), rel=1e-6)
    assert predicted.decode_moved + predicted.decode_hosted == pytest.approx(missed(placed, placed.quota), rel=1e-6)


def test_without_a_host_rate_the_link_has_them_all() -> None:
    _, placed, predicted = planned("experts", replace(CARD, host_read=None))
    assert 1 / predicted.decode_tokens_per_second == pytest.approx(
        DEVICE + missed(placed, placed.quota) / 40e9, rel=1e-6)
    assert (predicted.decode_roof, predicted.decode_hosted) == ("link", 0)


def test_demand_waits_for_the_link_and_pinned_finds_only_what_stays() -> None:
    _, placed, predicted = planned("demand")
    assert 1 / predicted.decode_tokens_per_second == pytest.approx(
        DEVICE + missed(placed, placed.quota) / 50e9, rel=1e-6)
    _, placed, predicted = planned("pinned")
    assert predicted.assumed_hit_rate == placed.pinned / 64
    assert 1 / predicted.decode_tokens_per_second == pytest.approx(
        DEVICE + missed(placed, placed.pinned) / 50e9, rel=1e-6)


def test_a_host_computes_instead_of_the_device_in_decode_and_is_streamed_past_in_prefill() -> None:
    _, placed, predicted = planned("host-experts:4")
    hosted = 4 * 4 * placed.record_bytes
    assert predicted.decode_hosted == hosted
    assert predicted.decode_moved == 0
    device = (step_limit(SHAPE, [(1, 512)]).bytes - hosted) / 1e12
    assert 1 / predicted.decode_tokens_per_second == pytest.approx(device + hosted / 60e9, rel=1e-6)
    assert predicted.decode_roof == "host"
    assert predicted.prefill_moved == pytest.approx(4 * SHAPE.distinct_experts(512) * placed.record_bytes, rel=1e-6)
    assert predicted.prefill_roof == "link"


def test_streamed_layers_move_whole_and_hide_what_they_can() -> None:
    _, placed, predicted = planned("sequential", max_model_len=2048, max_num_seqs=4, max_num_batched_tokens=512)
    moved = sum(UNITS.moved_bytes(part) for part, where in placed.parts.items() if where == "streamed")
    assert predicted.decode_moved == predicted.prefill_moved == moved
    assert 1 / predicted.decode_tokens_per_second == pytest.approx(moved / 50e9, rel=1e-6)
    fast = planned("sequential", replace(CARD, host_to_device=1e15), max_model_len=2048, max_num_seqs=4,
                   max_num_batched_tokens=512)[2]
    assert 1 / fast.decode_tokens_per_second == pytest.approx(DEVICE, rel=1e-6)
    assert fast.decode_roof == "memory"


def test_homes_on_disk_bind() -> None:
    _, placed, predicted = planned("experts", replace(CARD, disk_read=1e9), host_memory=UNITS.layer_record_bytes)
    assert len(placed.disk_experts) == 3
    read = missed(placed, placed.quota) * 3 / 4
    assert dict(predicted.decode_seconds)["disk"] == pytest.approx(read / 1e9, rel=1e-6)
    assert predicted.decode_roof == "disk"


def test_a_cpu_pays_for_a_copy_beside_what_it_computes() -> None:
    rates = replace(RATES, host_to_device=5e9)
    plan = make_plan(PlanRequest(gpu_memory=400 * MB, weights="sequential"), SMOLLM2, SMOLLM2_SPECS, CPU, rates)
    assert plan.placement is not None
    assert plan.placement.predicted is not None
    predicted = plan.placement.predicted
    shape = model_shape(SMOLLM2, SMOLLM2_SPECS, "float32")
    computing = step_limit(shape, [(1, predicted.context)]).seconds(rates)
    assert 1 / predicted.decode_tokens_per_second == pytest.approx(computing + predicted.decode_moved / 5e9, rel=1e-6)


def test_more_budget_is_never_predicted_slower() -> None:
    speeds = []
    for budget in range(1500 * MB, 3500 * MB, 100 * MB):
        plan = make_plan(PlanRequest(gpu_memory=budget, weights="experts", max_model_len=2048, max_num_seqs=4,
                                     max_num_batched_tokens=512), MANY, MANY_SPECS, GPU, CARD)
        assert plan.placement is not None
        assert plan.placement.predicted is not None
        speeds.append(plan.placement.predicted.decode_tokens_per_second)
    assert speeds == sorted(speeds)
    assert speeds[-1] > 1.5 * speeds[0]


# As read by a person, a script and another process

def test_the_tables_say_what_lies_where_and_what_binds() -> None:
    console = Console(file=io.StringIO(), width=140)
    plan, placed, _ = planned("experts")
    print_plan(console, plan, CARD)
    assert isinstance(console.file, io.StringIO)
    page = console.file.getvalue()
    for words in ("Weights, experts", f"4 paged: {placed.quota} slots each for 64 experts", "stream buffers", "3.2 GiB",
                  "link and host", "Uniform routing is assumed", "Prefill, 512 tokens", "60.0 GB/s"):
        assert words in page
    assert "Best case" not in page  # printed only for a resident model


def test_a_cpu_plan_counts_what_is_at_home_in_its_ram() -> None:
    plan = make_plan(PlanRequest(gpu_memory=400 * MB, weights="auto"), SMOLLM2, SMOLLM2_SPECS, CPU, RATES)
    assert plan.placement is not None
    assert plan.total_bytes == plan.device_bytes + plan.base_bytes + plan.placement.host_bytes
    console = Console(file=io.StringIO(), width=140)
    print_plan(console, plan, RATES)
    assert isinstance(console.file, io.StringIO)
    assert "Weights off the device" in console.file.getvalue()


def test_a_disk_that_was_not_timed_is_said_to_be_assumed() -> None:
    console = Console(file=io.StringIO(), width=140)
    print_plan(console, planned("experts", host_memory=GIB)[0], CARD)
    assert isinstance(console.file, io.StringIO)
    assert "The disk was not timed and is assumed to read at 1.0 GB/s" in " ".join(console.file.getvalue().split())


def test_the_json_and_the_wire_carry_the_whole_plan() -> None:
    plan, placed, predicted = planned("experts")
    data = json.loads(json.dumps(plan_json(plan, CARD)))
    assert data["placement"]["quota"] == placed.quota
    assert data["placement"]["predicted"]["decode_roof"] == predicted.decode_roof
    assert data["device_bytes"] == data["device_weight_bytes"] + data["kv_bytes"] + data["workspace_bytes"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan) == plan


def test_rates_for_a_choice_are_timed_once() -> None:
    rates = quick_rates("cpu")
    assert rates.host_to_device is not None
    assert rates.host_to_device > 1e8
    assert quick_rates("cpu") is rates


# Flags

@pytest.mark.parametrize(("flags", "words"), [
    ({"weights": "some"}, ["--weights", "host-experts:N", "'some'"]),
    ({"weights": "experts:3"}, ["host-experts:N"]),
    ({"weights": "host-experts:0"}, ["host-experts:N"]),
    ({"weights": "host-experts:-1"}, ["host-experts:N"]),
    ({"weights": "host-experts:many"}, ["host-experts:N"]),
    ({"weights": "sequential", "cpu_offload_gb": 4.0}, ["--cpu-offload-gb", "--weights sequential", "contradict"]),
    ({"weights": "resident", "cpu_offload_gb": 4.0}, ["contradict"]),
    ({"cpu_offload_gb": -1.0}, ["--cpu-offload-gb", "-1.0"]),
    ({"policy": "mru"}, ["--policy", "next-layer", "module:Class", "'mru'"]),
    ({"policy": "lfru", "weights": "sequential"}, ["--policy lfru", "--weights sequential"]),
    ({"policy": "lfru", "weights": "pinned"}, ["--policy lfru", "--weights experts"]),
    ({"policy": "static", "cpu_offload_gb": 2.0}, ["--policy static", "--cpu-offload-gb"]),
    ({"paged_tokens": 0}, ["--paged-tokens", "at least 1"]),
    ({"paged_tokens": 4, "weights": "resident"}, ["--paged-tokens", "--weights resident"]),
    ({"paged_tokens": 4, "cpu_offload_gb": 2.0}, ["--paged-tokens", "--cpu-offload-gb"]),
    ({"load_format": "null", "weights": "experts"}, ["--load-format null", "--weights"]),
])
def test_contradictions_are_refused_in_one_sentence(flags: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SpilloverError) as error:
        EngineConfig(**flags)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("flags", [
    {}, {"weights": "host-experts:12"}, {"weights": "host-experts"}, {"weights": "experts", "policy": "next-layer"},
    {"policy": "mine.policies:Mine"}, {"cpu_offload_gb": 8.0, "weights": "demand"}, {"cpu_offload_gb": 0.0},
    {"paged_tokens": 4, "weights": "host-experts:3"},
])
def test_flags_that_agree_are_taken_and_survive_the_wire(flags: dict[str, Any]) -> None:
    config = EngineConfig(**flags)
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config
    assert config.cpu_offload_gb != 0
