"""For any model and budget, a plan stays within it and places every unit once, or names a budget that works."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spillover.errors import PlanError
from spillover.kernels.extents import num_passes
from spillover.kernels.moe.records import Record
from spillover.models.architectures import gpt_oss, llama, qwen3_moe
from spillover.models.config import ModelConfig
from spillover.models.weight_specs import kept_on
from spillover.models.weights import one_expert_of, split_experts
from spillover.plan.placement import MANAGED, SLOTTED, WeightPlan
from spillover.plan.planner import Plan, PlanRequest, make_plan
from spillover.plan.strategies import MOST_PASSES, Choice, Strategies, managed_page
from spillover.plan.units import weight_units
from spillover.units import parse_bytes
from support.models.loading import dummy_weights
from support.plan_shapes import CPU, GIB, GPT_OSS, GPU, RATES, SMOLLM2, SMOLLM2_SPECS, TINY

MB = 10**6
STRATEGIES = ("auto", "demand", "sequential", "experts", "host-experts", "host-experts:2", "pinned", *MANAGED)


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelConfig, Any]:
    """Draw small models of every kind that moves: dense, mixtures, mixtures with dense layers, in 4 and 8 bits."""
    layers = draw(st.integers(2, 6))
    kind = draw(st.sampled_from(["dense", "mixture", "fp8", "mxfp4"]))
    config = replace(TINY, vocab_size=draw(st.sampled_from([1000, 20_000])), hidden_size=512, num_layers=layers,
                     num_heads=8, num_kv_heads=2, head_dim=64, intermediate_size=1536, max_position=4096,
                     tie_embeddings=draw(st.booleans()), windows=(None,) * layers, dtype="bfloat16")
    if kind == "dense":
        return config, llama.weight_specs(config)
    experts = draw(st.sampled_from([4, 16, 32]))
    config = replace(config, num_experts=experts, experts_per_token=draw(st.integers(1, 4)),
                     expert_intermediate_size=512, expert_format="dense" if kind == "mixture" else kind)
    if kind == "mxfp4":
        config = replace(config, architecture="GptOssForCausalLM", swiglu_limit=7.0)
        return config, gpt_oss.weight_specs(config)
    dense = (0,) if draw(st.booleans()) else ()
    config = replace(config, architecture="Qwen3MoeForCausalLM", qk_norm=True, dense_layers=dense)
    return config, qwen3_moe.weight_specs(config)


requests = st.fixed_dictionaries({
    "gpu_memory": st.floats(math.log(MB), math.log(1000 * MB)).map(lambda size: int(math.exp(size))),
    "weights": st.sampled_from(STRATEGIES),
    "max_model_len": st.none() | st.integers(1, 4096),
    "max_num_seqs": st.none() | st.integers(1, 64),
    "max_num_batched_tokens": st.none() | st.integers(1, 1024),
    "paged_tokens": st.none() | st.integers(1, 8),
    "host_memory": st.none() | st.integers(10 * MB, 600 * MB),
})
machines = st.sampled_from([CPU, GPU])


def planned(flags: dict[str, Any], model: tuple[ModelConfig, Any], machine: Any) -> Plan:
    return make_plan(PlanRequest(model="A model", **flags), *model, machine)


@settings(max_examples=150, deadline=None)
@given(requests, models(), machines)
def test_a_plan_keeps_to_its_budgets_and_places_each_unit_once(flags: dict[str, Any], model: Any, machine: Any) -> None:
    config, specs = model
    try:
        plan = planned(flags, model, machine)
    except PlanError:
        assume(False)
    assert plan.device_bytes <= flags["gpu_memory"]
    assert plan.blocks_per_sequence <= plan.num_blocks or plan.placement is None
    assert plan.max_model_len >= (flags["max_model_len"] or 2048)
    placed = plan.placement
    if placed is None:
        assert plan.device_weight_bytes == plan.weight_bytes
        return
    if placed.managed_bytes:
        check_pages(placed, plan, config, specs)
    else:
        check_units(placed, plan, config, specs)
    if flags["host_memory"] is not None:
        assert placed.host_bytes + plan.host_bytes <= flags["host_memory"]
    if machine is CPU:
        assert plan.device_bytes + placed.host_bytes + plan.host_bytes <= machine.memory_available
    if placed.quota:
        k, experts = config.experts_per_token, config.num_experts
        assert placed.quota <= experts
        assert placed.paged_tokens == flags["paged_tokens"] or flags["paged_tokens"] is None
        if plan.device == "cuda":
            # A token's experts fit, and one more; with pinned experts, the remaining slots fit those of a step.
            tokens = placed.paged_tokens if placed.strategy == "pinned" else 1
            assert placed.quota - placed.pinned % experts >= min(experts, tokens * k + 1)
            assert placed.stream_buffers >= 2


def check_units(placed: WeightPlan, plan: Plan, config: ModelConfig, specs: Any) -> None:
    units = weight_units(config, kept_on(specs, plan.device, plan.dtype), plan.dtype)
    assert list(placed.parts) == list(specs)
    assert set(placed.experts) == set(units.stacks)
    assert set(placed.parts.values()) <= {"resident", "streamed", "demand"}
    away = [part for part, where in placed.parts.items() if where != "resident"]
    layers = [layer for layer, where in placed.experts.items() if where != "resident"]
    assert away or layers
    # Every non-resident unit has one home.
    homes = sum(units.records[part] for part in away) + len(layers) * units.layer_record_bytes
    assert placed.host_bytes + placed.disk_bytes == homes
    assert set(placed.disk_parts) <= set(away)
    assert set(placed.disk_experts) <= set(layers)
    assert placed.disk_bytes == (sum(units.records[part] for part in placed.disk_parts)
                                 + len(placed.disk_experts) * units.layer_record_bytes)
    assert units.total == placed.resident_bytes + (
        sum(units.parts[part] for part in away) + sum(units.stacks[layer] for layer in layers))
    # Units that move have slots to move through.
    assert (placed.ring > 0) == bool(away)
    assert placed.ring >= 2 or "streamed" not in placed.parts.values()
    assert (placed.quota > 0) == any(where in SLOTTED for where in placed.experts.values())
    travels = [units.records[part] + (units.layer_record_bytes if placed.experts.get(_layer(part)) == "streamed" else 0)
               for part in away]
    assert placed.ring_bytes == max(travels, default=0)
    assert placed.device_bytes >= (placed.resident_bytes + placed.slots * placed.record_bytes
                                   + placed.ring * placed.ring_bytes)
    for column in ("device", "host", "disk"):
        assert sum(getattr(row, column) for row in placed.rows) == getattr(placed, f"{column}_bytes")
    assert "host" not in placed.experts.values() or not placed.disk_bytes


def check_pages(placed: WeightPlan, plan: Plan, config: ModelConfig, specs: Any) -> None:
    units = weight_units(config, kept_on(specs, plan.device, plan.dtype), plan.dtype)
    assert list(placed.parts) == list(specs)
    assert {*placed.parts.values(), *placed.experts.values()} == {"managed"}
    page = managed_page(plan.device)
    assert placed.host_bytes == placed.managed_bytes >= sum(map(units.moved_bytes, units.parts))
    assert placed.disk_bytes == placed.resident_bytes == placed.quota == placed.ring == 0
    # The largest layer fits, together with the next one if that is prefetched.
    parts = max(map(units.moved_bytes, units.parts)) * (2 if placed.strategy == "uvm-prefetch" else 1)
    assert min(parts, placed.managed_bytes) <= placed.device_bytes <= placed.managed_bytes
    assert placed.device_bytes % page == placed.managed_bytes % page == 0
    for column in ("device", "host", "disk"):
        assert sum(getattr(row, column) for row in placed.rows) == getattr(placed, f"{column}_bytes")


def _layer(part: str) -> int:
    return int(part.split(".")[1]) if "." in part else -1


@settings(max_examples=100, deadline=None)
@given(requests, models(), machines)
def test_what_a_refusal_names_works_and_less_does_not(flags: dict[str, Any], model: Any, machine: Any) -> None:
    flags = flags | {"gpu_memory": flags["gpu_memory"] // 5}
    try:
        planned(flags, model, machine)
        assume(False)
    except PlanError as error:
        sentence = str(error)
    assert "\n" not in sentence
    least = re.search(r"--gpu-memory to at least ([0-9.]+[MG]iB)", sentence)
    if least is not None:
        budget = parse_bytes(least[1])
        planned(flags | {"gpu_memory": budget}, model, machine)
        with pytest.raises(PlanError):
            planned(flags | {"gpu_memory": budget - 3 * MB}, model, machine)
    other = re.search(r"use --weights ([a-z-]+), which fits", sentence)
    if other is not None:
        planned(flags | {"weights": other[1]}, model, machine)
    host = re.search(r"--host-memory to at least ([0-9.]+[MG]iB)", sentence)
    if host is not None and least is None:
        with pytest.raises(PlanError, match=r"--gpu-memory is|--max-model-len"):
            planned(flags | {"host_memory": parse_bytes(host[1]), "gpu_memory": MB}, model, machine)
    assert least or other or host or "has no experts" in sentence or "choose a smaller model" in sentence or (
        "lower" in sentence)


@settings(max_examples=100, deadline=None)
@given(models(), st.sampled_from(["cpu", "cuda"]),
       st.sampled_from(["demand", "sequential", "experts", "pinned", *MANAGED]),
       st.integers(0, 400 * MB), st.integers(0, 400 * MB))
def test_what_fits_in_a_room_fits_in_a_larger_one(model: Any, device: str, name: str, room: int, more: int) -> None:
    config, specs = model
    strategies = Strategies(weight_units(config, specs, "bfloat16"), device, 10 * GIB)
    small, large = strategies.place(Choice(name), room), strategies.place(Choice(name), room + more)
    assume(small is not None)
    assert large is not None
    assert small.device_bytes <= room
    assert large.device_bytes <= room + more
    if not large.is_resident and all(where == "resident" for where in small.parts.values()):
        assert large.quota >= small.quota
    assert strategies.least(Choice(name)) <= room


@settings(max_examples=40, deadline=None)
@given(st.integers(200 * MB, 20 * GIB), st.sampled_from(["float32", "bfloat16"]), machines)
def test_what_fits_is_planned_as_if_there_were_no_strategies(budget: int, dtype: str, machine: Any) -> None:
    flags = {"gpu_memory": budget, "dtype": dtype}
    try:
        resident = make_plan(PlanRequest(**flags), SMOLLM2, SMOLLM2_SPECS, machine)
    except PlanError:
        assume(False)
    assume(resident.max_model_len >= 2048)
    for weights in ("auto", "sequential", "demand", "pinned", "uvm"):
        assert make_plan(PlanRequest(**flags, weights=weights), SMOLLM2, SMOLLM2_SPECS, machine) == resident


# Each strategy, with a budget of half the model

HALF = 26 * 10**8  # for GPT_OSS with more experts: 3.2 GiB of them in 4 layers, and the other weights
MANY = replace(GPT_OSS, num_experts=64)
MANY_SPECS = gpt_oss.weight_specs(MANY)
UNITS = weight_units(MANY, MANY_SPECS, "bfloat16")


def half(weights: str = "auto", machine: Any = GPU, **flags: Any) -> tuple[Plan, WeightPlan]:
    plan = make_plan(PlanRequest(model="gpt-oss", gpu_memory=HALF, weights=weights, **flags), MANY, MANY_SPECS, machine)
    assert plan.placement is not None
    return plan, plan.placement


def test_experts_are_paged_through_equal_quotas_and_all_else_stays() -> None:
    _, placed = half("experts")
    assert set(placed.parts.values()) == {"resident"}
    assert placed.experts == dict.fromkeys(range(4), "paged")
    assert placed.quota > 8
    assert placed.record_bytes == 3 * 2880 * 2880 // 2 + 3 * 2880 * 92 + 2 * 3 * 2880 + 128  # to a multiple of 256
    assert placed.record_bytes % 256 == 0
    assert placed.host_bytes == 4 * 64 * placed.record_bytes
    assert placed.slots == 4 * placed.quota + placed.stream_buffers
    assert (placed.paged_tokens, placed.pinned) == (64, 0)
    assert placed.spare_slots == 4 * (placed.quota - 4 - 1)  # all but a token's experts, and one to evict


def test_asked_tokens_are_kept_or_refused() -> None:
    for tokens in (2, 100):  # experts without a slot pass through stream buffers
        assert half("experts", paged_tokens=tokens)[1].paged_tokens == tokens
    assert half("pinned", paged_tokens=2)[1].paged_tokens == 2
    with pytest.raises(PlanError, match="raise --gpu-memory to at least"):
        make_plan(PlanRequest(gpu_memory=HALF // 2, weights="pinned", paged_tokens=8), MANY, MANY_SPECS, GPU)


def test_few_stream_buffers_page_steps_that_need_few_passes() -> None:
    strategies = Strategies(UNITS, "cuda", 1 << 40)
    plan = strategies.place(Choice("experts"), strategies.least(Choice("experts")) or 0)
    assert plan is not None
    assert (plan.quota, plan.stream_buffers) == (5, 2)
    passes = [num_passes(tokens * 4, 64, 5, 2) for tokens in (plan.paged_tokens, plan.paged_tokens + 1)]
    assert passes[0] <= MOST_PASSES < passes[1]


def test_layers_stay_evenly_where_others_are_fetched_ahead_and_first_where_they_are_not() -> None:
    def planned_layers(weights: str) -> list[int]:
        plan = make_plan(PlanRequest(gpu_memory=700 * MB, weights=weights, max_model_len=256, max_num_seqs=4,
                                     max_num_batched_tokens=64), SMOLLM2, SMOLLM2_SPECS, replace(CPU, cuda=()))
        assert plan.placement is None
        smaller = make_plan(PlanRequest(gpu_memory=400 * MB, weights=weights, max_model_len=256, max_num_seqs=4,
                                        max_num_batched_tokens=64), SMOLLM2, SMOLLM2_SPECS, CPU)
        assert smaller.placement is not None
        assert smaller.placement.ring == (2 if weights == "sequential" else 1)
        return [layer for layer in range(30) if smaller.placement.parts[f"layers.{layer}"] == "resident"]

    assert planned_layers("demand") == planned_layers("pinned") == list(range(len(planned_layers("demand"))))
    spread = planned_layers("sequential")
    gaps = {later - earlier for earlier, later in itertools.pairwise(spread)}
    assert max(gaps) - min(gaps) <= 1


def test_streamed_layers_take_their_experts_along() -> None:
    _, placed = half("sequential", max_model_len=2048, max_num_seqs=4, max_num_batched_tokens=256)
    moved = [layer for layer in range(4) if placed.parts[f"layers.{layer}"] == "streamed"]
    assert moved
    assert [layer for layer, where in placed.experts.items() if where == "streamed"] == moved
    assert placed.ring_bytes == UNITS.records["layers.0"] + 64 * placed.record_bytes
    assert (placed.quota, placed.stream_buffers, placed.ring) == (0, 0, 2)


def test_the_fewest_layers_go_to_the_host_or_as_many_as_were_asked_for() -> None:
    steps = {"max_model_len": 2048, "max_num_seqs": 4, "max_num_batched_tokens": 256}
    _, placed = half("host-experts", **steps)
    hosted = [layer for layer, where in placed.experts.items() if where == "host"]
    assert hosted == list(range(len(hosted)))
    assert placed.stream_buffers >= 2  # long steps stream them through it
    with pytest.raises(PlanError, match=rf"host-experts:{len(hosted) - 1} needs .* use --weights experts, which fits"):
        half(f"host-experts:{len(hosted) - 1}", **steps)
    _, more = half("host-experts:4")
    assert list(more.experts.values()) == ["host"] * 4
    with pytest.raises(PlanError, match="has 4 layers of experts; lower N to at most 4"):
        half("host-experts:5")
    assert half("host-experts", CPU)[1].stream_buffers == 0  # computed in place


def test_pinned_experts_never_move_and_the_others_share_what_one_step_needs() -> None:
    _, placed = half("pinned")
    assert placed.experts == dict.fromkeys(range(4), "pinned")
    assert placed.quota - placed.pinned == placed.paged_tokens * 4 + 1
    assert half("pinned", CPU)[1].pinned == half("pinned", CPU)[1].quota - 1


def test_offload_takes_whole_layers_from_the_first_until_enough_are_away() -> None:
    layer = UNITS.moved_bytes("layers.0")
    plan = make_plan(PlanRequest(gpu_memory=32 * 10**8, cpu_offload=layer + 1), MANY, MANY_SPECS, GPU)
    placed = plan.placement
    assert placed is not None
    assert placed.strategy == "cpu-offload"
    assert [placed.parts[f"layers.{n}"] for n in range(4)] == ["demand", "demand", "resident", "resident"]
    assert [placed.experts[n] for n in range(4)] == ["streamed", "streamed", "resident", "resident"]
    assert placed.host_bytes == 2 * layer
    assert (placed.ring, placed.ring_bytes) == (1, layer)
    with pytest.raises(PlanError, match="lower it to at most"):
        make_plan(PlanRequest(gpu_memory=32 * 10**8, cpu_offload=5 * layer), MANY, MANY_SPECS, GPU)


def test_more_managed_memory_than_the_card_has_free_is_refused_unless_it_is_asked_for() -> None:
    _, placed = half("uvm")
    assert placed.strategy == "uvm"
    beside = HALF - placed.device_bytes
    (card,) = GPU.cuda
    enough = replace(GPU, cuda=(replace(card, free=placed.managed_bytes + beside),))
    assert half("uvm", enough)[1] == placed
    short = replace(GPU, cuda=(replace(card, free=placed.managed_bytes + beside - 1),))
    with pytest.raises(PlanError, match=r"of managed memory beside .* can hang the machine; use --weights experts, "
                                        r"which fits or give --uvm-oversubscribe") as refusal:
        half("uvm", short)
    assert "\n" not in str(refusal.value)
    assert half("uvm", short, uvm_oversubscribe=True)[1] == placed


def test_managed_memory_has_its_home_in_host_memory() -> None:
    _, placed = half("uvm-advise")
    with pytest.raises(PlanError, match=r"keeps .* of weights in host memory but .* may be used; use --weights"):
        half("uvm-advise", host_memory=placed.managed_bytes - 1)
    assert half("uvm-advise", host_memory=placed.managed_bytes)[1] == placed


def test_what_managed_memory_moves_is_predicted_by_its_room() -> None:
    rates = replace(RATES, device="cuda", memory_read=1e12, bfloat16=1e14, host_to_device=50e9, kernel_read=50e9)

    def moved(budget: int) -> int:
        plan = make_plan(PlanRequest(gpu_memory=budget, weights="uvm"), MANY, MANY_SPECS, GPU, rates)
        assert plan.placement is not None
        assert plan.placement.predicted is not None
        return plan.placement.predicted.decode_moved

    found = [moved(HALF + more * 10**8) for more in range(-2, 6)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]
    plan = make_plan(PlanRequest(gpu_memory=400 * MB, weights="uvm", max_model_len=256, max_num_seqs=4,
                                 max_num_batched_tokens=64), SMOLLM2, SMOLLM2_SPECS, CPU, RATES)
    assert plan.placement is not None
    assert plan.placement.predicted is not None
    assert plan.placement.predicted.decode_moved > plan.weight_bytes  # least recently used: no expert is found again


@pytest.mark.parametrize("weights", ["experts", "host-experts", "host-experts:2"])
def test_a_model_without_experts_says_what_to_use(weights: str) -> None:
    with pytest.raises(PlanError, match="has no experts; use --weights sequential"):
        make_plan(PlanRequest(gpu_memory=400 * MB, weights=weights), SMOLLM2, SMOLLM2_SPECS, CPU)


def test_resident_refuses_as_ever() -> None:
    with pytest.raises(PlanError, match=r"needs 513 MiB of weights \+ "):
        make_plan(PlanRequest(gpu_memory=400 * MB, weights="resident"), SMOLLM2, SMOLLM2_SPECS, CPU)


# Host memory and disk

def test_weights_take_host_memory_before_kv_does() -> None:
    plan, placed = half("experts", host_memory=8 * GIB)
    (host,) = plan.tiers
    assert host.bytes == 8 * GIB - placed.host_bytes
    assert plan.host_bytes + placed.host_bytes == 8 * GIB
    plan, placed = half("experts", host_memory=placed.host_bytes)
    assert plan.tiers == ()
    assert placed.disk_bytes == 0


def test_the_last_layers_are_at_home_on_disk_where_host_memory_is_short() -> None:
    _, all_there = half("experts")
    one = all_there.host_bytes // 4
    _, placed = half("experts", host_memory=all_there.host_bytes - 1)
    assert placed.disk_experts == (3,)
    assert (placed.host_bytes, placed.disk_bytes) == (3 * one, one)
    _, placed = half("experts", host_memory=one // 2)
    assert placed.disk_experts == (3, 2, 1, 0)
    with pytest.raises(PlanError, match=r"in host memory but .* may be used; use --weights experts, which fits"):
        half("host-experts:4", host_memory=one // 2)


def test_without_a_budget_weights_leave_some_host_memory_free() -> None:
    small = replace(GPU, memory_available=all_experts() + (2 << 30) - 1)
    assert half("experts", small)[1].disk_experts == (3,)
    assert half("experts", replace(small, memory_available=all_experts() + (2 << 30)))[1].disk_bytes == 0
    pinned = replace(GPU, pinnable=all_experts() // 2)
    assert half("experts", pinned)[1].disk_experts == (3, 2)


def all_experts() -> int:
    return 4 * UNITS.layer_record_bytes


def test_a_cpu_without_a_budget_keeps_what_it_can_and_reads_the_rest_from_disk() -> None:
    plan = make_plan(PlanRequest(weights="auto", dtype="bfloat16"), MANY, MANY_SPECS,
                     replace(CPU, memory_available=3 * GIB))
    assert plan.placement is not None
    assert plan.placement.host_bytes == 0
    assert plan.placement.disk_bytes > 0
    assert plan.device_bytes <= GIB


# Auto

def test_auto_takes_the_fastest_by_the_rates_of_the_machine() -> None:
    slow_host = replace(RATES, device="cuda", memory_read=1e12, bfloat16=1e14, host_to_device=50e9, kernel_read=50e9)

    def chosen(**rates: Any) -> WeightPlan:
        plan = make_plan(PlanRequest(gpu_memory=HALF, weights="auto"), MANY, MANY_SPECS, GPU,
                         replace(slow_host, **rates))
        assert plan.placement is not None
        return plan.placement

    assert chosen(host_read=10e9).strategy == "experts"
    # With so slow a link, computing on the host is better than moving any byte.
    assert chosen(host_to_device=1e6, kernel_read=1e6, host_read=900e9).strategy == "host-experts"
    best = chosen(host_read=80e9)
    assert best.predicted is not None
    for weights in ("demand", "sequential", "host-experts", "pinned"):
        other = make_plan(PlanRequest(gpu_memory=HALF, weights=weights), MANY, MANY_SPECS, GPU,
                          replace(slow_host, host_read=80e9)).placement
        assert other is not None
        assert other.predicted is not None
        assert best.predicted.decode_tokens_per_second >= other.predicted.decode_tokens_per_second


def test_nothing_is_timed_for_a_model_that_fits() -> None:
    def never(device: str) -> Any:
        raise AssertionError(device)

    make_plan(PlanRequest(weights="auto"), SMOLLM2, SMOLLM2_SPECS, CPU, measure=never)
    plan = make_plan(PlanRequest(weights="auto", gpu_memory=400 * MB), SMOLLM2, SMOLLM2_SPECS, CPU,
                     measure=lambda device: RATES)
    assert plan.placement is not None
    assert plan.placement.predicted is not None
    assert plan.costs is None


def test_smaller_steps_come_before_weights_leave() -> None:
    whole = make_plan(PlanRequest(), SMOLLM2, SMOLLM2_SPECS, CPU)
    tight = whole.weight_bytes + 190 * MB
    plan = make_plan(PlanRequest(gpu_memory=tight, weights="auto"), SMOLLM2, SMOLLM2_SPECS, CPU)
    assert plan.placement is None
    assert plan.max_num_seqs < whole.max_num_seqs
    assert plan.max_model_len >= 2048


def test_steps_that_stream_are_larger_where_they_take_little_of_the_budget() -> None:
    config = replace(GPT_OSS, num_layers=36, num_experts=64, windows=(128, None) * 18)
    specs = gpt_oss.weight_specs(config)

    def steps(budget: int, **flags: Any) -> int:
        plan = make_plan(PlanRequest(gpu_memory=budget, weights="auto", **flags), config, specs, GPU)
        assert plan.placement is not None
        return plan.max_num_batched_tokens

    resident = make_plan(PlanRequest(gpu_memory=20 * 10**9), SMOLLM2, SMOLLM2_SPECS, GPU)
    assert steps(20 * 10**9) == 2 * resident.max_num_batched_tokens
    assert steps(6 * 10**9) < resident.max_num_batched_tokens
    assert steps(20 * 10**9, max_num_batched_tokens=700) == 700


# The counts, compared with the bytes that weights really take

@pytest.mark.parametrize("kind", ["dense", "mixture", "fp8", "mxfp4"])
@pytest.mark.parametrize("packed", [False, True])
def test_units_are_counted_as_they_will_lie(kind: str, packed: bool) -> None:
    config = replace(TINY, hidden_size=64, vocab_size=320, intermediate_size=128, head_dim=32, num_kv_heads=2)
    specs: Any = llama.weight_specs(config)
    if kind != "dense":
        config = replace(config, num_experts=4, experts_per_token=2, expert_intermediate_size=96,
                         expert_format="dense" if kind == "mixture" else kind, swiglu_limit=7.0,
                         qk_norm=kind != "mxfp4")
        specs = (gpt_oss if kind == "mxfp4" else qwen3_moe).weight_specs(config)
    weights = dummy_weights(specs, torch.float32, torch.device("cpu"), pack=packed)
    units = weight_units(config, kept_on(specs, "cpu", "float32") if packed else specs, "float32")
    for part, held in weights.parts.items():
        common, experts = split_experts(held)
        assert Record.of(common).nbytes == units.records[part]
        assert sum(int(weight.nbytes) for weight in common.values()) == units.parts[part]
        if experts:
            assert Record.of(one_expert_of(experts)).nbytes == units.record_bytes
            assert sum(int(weight.nbytes) for weight in experts.values()) == units.stacks[_layer(part)]
