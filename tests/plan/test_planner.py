"""A plan never exceeds its budget, grows with it, and is rejected with one helpful sentence."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spillover.errors import PlanError
from spillover.kernels import native
from spillover.kernels.fields import ITEMSIZE
from spillover.memory.kv.kv_cache import KVCache
from spillover.models.architectures import gpt_oss
from spillover.plan.planner import RUNTIME_BYTES, STEPS_IN_FLIGHT, Plan, PlanRequest, make_plan, size_flag
from spillover.plan.workspace import max_samples, workspace
from spillover.units import parse_bytes
from support.plan_shapes import CPU, GIB, GPT_OSS, GPT_OSS_SPECS, GPU, RATES, SMOLLM2, SMOLLM2_SPECS

MB = 10**6


def plan_smollm2(machine: Any = CPU, **flags: Any) -> Plan:
    return make_plan(PlanRequest(model="SmolLM2", **flags), SMOLLM2, SMOLLM2_SPECS, machine)


def refusal(machine: Any = CPU, config: Any = SMOLLM2, specs: Any = SMOLLM2_SPECS, **flags: Any) -> str:
    with pytest.raises(PlanError) as error:
        make_plan(PlanRequest(model="SmolLM2", **flags), config, specs, machine)
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence


# Plans that fit

def flags(least: int, most: int) -> st.SearchStrategy[dict[str, Any]]:
    """Draw flags with budgets from `least` to `most`, small ones as often as large ones."""
    return st.fixed_dictionaries({
        "gpu_memory": st.floats(math.log(least), math.log(most)).map(lambda size: int(math.exp(size))),
        "block_size": st.sampled_from([8, 16, 32, 128]),
        "max_num_seqs": st.none() | st.integers(1, 300),
        "max_num_batched_tokens": st.none() | st.integers(1, 4096),
        "max_model_len": st.none() | st.integers(1, 1024),
        "enable_chunked_prefill": st.booleans(),
        "dtype": st.sampled_from(["auto", "float32", "bfloat16"]),
    })


models = st.sampled_from([(SMOLLM2, SMOLLM2_SPECS), (GPT_OSS, GPT_OSS_SPECS)])


@settings(max_examples=150, deadline=None)
@given(flags(1_000 * MB, 20_000 * MB), models)
def test_a_plan_is_within_its_budget_and_serves_its_longest_sequence(given_flags: dict[str, Any], model: Any) -> None:
    config, specs = model
    try:
        plan = make_plan(PlanRequest(**given_flags), config, specs, CPU)
    except PlanError:
        assume(False)
    assert plan.device_bytes <= given_flags["gpu_memory"]
    assert plan.total_bytes == plan.device_bytes + CPU.process_bytes + RUNTIME_BYTES
    # No whole block is unused.
    assert plan.device_bytes + plan.block_bytes > given_flags["gpu_memory"]
    assert plan.kv_bytes == (plan.num_blocks + 1) * plan.block_bytes
    assert 1 <= plan.max_model_len <= config.max_position
    # The KV cache's own count of the blocks that such a sequence holds at most.
    cache = KVCache(1, plan.block_size, plan.windows)
    chunk = STEPS_IN_FLIGHT * plan.max_num_batched_tokens
    assert plan.blocks_per_sequence == cache.peak_blocks(plan.max_model_len, chunk) <= plan.num_blocks
    if not given_flags["enable_chunked_prefill"]:
        assert plan.max_num_batched_tokens >= plan.max_model_len


@settings(max_examples=150, deadline=None)
@given(flags(1_000 * MB, 20_000 * MB), models, st.integers(0, 500 * MB))
def test_more_budget_never_gives_less(given_flags: dict[str, Any], model: Any, more: int) -> None:
    config, specs = model
    try:
        small = make_plan(PlanRequest(**given_flags), config, specs, CPU)
    except PlanError:
        assume(False)
    large = make_plan(
        PlanRequest(**(given_flags | {"gpu_memory": given_flags["gpu_memory"] + more})), config, specs, CPU
    )
    assert large.max_model_len >= small.max_model_len
    # Without chunks a longer prompt is a larger step, whose workspace may take the space of a few blocks.
    if given_flags["enable_chunked_prefill"] or large.max_model_len == small.max_model_len:
        assert large.num_blocks >= small.num_blocks


@settings(max_examples=150, deadline=None)
@given(flags(10 * MB, 800 * MB), models)
def test_what_a_refusal_names_would_fit(given_flags: dict[str, Any], model: Any) -> None:
    config, specs = model
    try:
        make_plan(PlanRequest(**given_flags), config, specs, CPU)
        assume(False)
    except PlanError as error:
        sentence = str(error)
    cures = []
    if least := re.search(r"raise --gpu-memory to at least ([0-9.]+(?:[MG]i)?B)", sentence):
        cures.append({"gpu_memory": parse_bytes(least[1])})
    if most := re.search(r"at most ([0-9,]+) tokens fit: lower --max-model-len", sentence):
        cures.append({"max_model_len": int(most[1].replace(",", ""))})
    if sentence.endswith("raise the one or lower the other"):
        length = given_flags["max_model_len"]
        cures.append({"max_num_batched_tokens": length, "gpu_memory": 20_000 * MB})
    assert cures, f"a refusal that names nothing to type: {sentence}"
    for cure in cures:
        cured = make_plan(PlanRequest(**(given_flags | cure)), config, specs, CPU)
        assert cured.device_bytes <= (given_flags | cure)["gpu_memory"]


def test_the_defaults_of_a_cpu() -> None:
    plan = plan_smollm2()
    assert (plan.device, plan.dtype, plan.max_num_seqs, plan.max_num_batched_tokens) == ("cpu", "float32", 64, 512)
    assert plan.max_model_len == 8192
    assert plan.weight_bytes == 538_060_032
    assert GIB - plan.block_bytes < plan.kv_bytes <= GIB
    assert plan.token_capacity == plan.num_blocks * 16
    assert plan.max_concurrency == plan.num_blocks / 512
    assert plan.base_bytes == CPU.process_bytes + RUNTIME_BYTES


def test_a_cpu_short_of_memory_gives_half_of_what_is_left_to_kv() -> None:
    plan = plan_smollm2(replace(CPU, memory_available=1200 * MB))
    left = 1200 * MB - plan.weight_bytes - plan.workspace_bytes
    assert left // 2 - 2 * plan.block_bytes <= plan.kv_bytes <= left // 2


def test_a_length_that_is_asked_for_gets_more_than_the_default() -> None:
    config = replace(SMOLLM2, max_position=65536)
    plan = make_plan(PlanRequest(max_model_len=65536), config, SMOLLM2_SPECS, CPU)
    assert plan.num_blocks == 4096
    assert plan.kv_bytes > GIB


def test_the_defaults_of_a_gpu() -> None:
    plan = plan_smollm2(GPU)
    assert (plan.device, plan.dtype, plan.max_num_seqs, plan.max_num_batched_tokens) == ("cuda", "bfloat16", 256, 8192)
    assert 0.9 * 20 * GIB - 2 * plan.block_bytes < plan.total_bytes <= 0.9 * 20 * GIB
    assert plan.base_bytes == 0
    assert plan_smollm2(GPU, device="cpu").dtype == "float32"


def test_a_given_count_of_blocks_is_kept_exactly() -> None:
    plan = plan_smollm2(num_gpu_blocks_override=10)
    assert plan.num_blocks == 10
    assert plan.max_model_len == 160
    assert plan_smollm2(num_gpu_blocks_override=10, max_model_len=48).max_model_len == 48


def test_without_chunks_a_step_holds_the_longest_prompt() -> None:
    assert plan_smollm2(enable_chunked_prefill=False).max_num_batched_tokens == 8192
    assert plan_smollm2(enable_chunked_prefill=False, max_model_len=100).max_num_batched_tokens == 512
    assert plan_smollm2(enable_chunked_prefill=False, max_num_batched_tokens=700).max_model_len == 700


def test_a_step_is_no_larger_than_all_prompts_that_may_run_at_once() -> None:
    assert plan_smollm2(max_num_seqs=2, max_model_len=100).max_num_batched_tokens == 200
    assert plan_smollm2(max_num_seqs=2, max_model_len=100, max_num_batched_tokens=300).max_num_batched_tokens == 300
    assert plan_smollm2(max_num_seqs=2, max_model_len=1000).max_num_batched_tokens == 512


def test_a_window_needs_only_its_window() -> None:
    plan = make_plan(PlanRequest(max_num_batched_tokens=64, max_model_len=16000), GPT_OSS, GPT_OSS_SPECS, CPU)
    assert plan.windows == (None, 128)
    assert plan.blocks_per_sequence == 1000 + (128 + 128 - 2 + 15) // 16 + 1


def test_costs_come_from_measured_rates() -> None:
    plan = make_plan(PlanRequest(), SMOLLM2, SMOLLM2_SPECS, CPU, RATES)
    assert plan.costs is not None
    assert plan.costs.decode_1.seconds == pytest.approx(plan.weight_bytes / RATES.memory_read, rel=0.1)
    assert plan.costs.decode_16.seconds > plan.costs.decode_1.seconds
    assert plan.costs.prefill.bound == "compute"


# Plans that do not fit, and their error messages

def test_weights_that_do_not_fit() -> None:
    sentence = refusal(gpu_memory=400 * MB)
    assert sentence.startswith("SmolLM2 needs 513 MiB of weights + ")
    assert "but --gpu-memory is 382MiB; raise --gpu-memory to at least" in sentence
    least = sentence.split("at least ")[1]
    plan = plan_smollm2(gpu_memory=parse_bytes(least))
    assert plan.max_model_len >= 256
    refusal(gpu_memory=parse_bytes(least) - 2 * MB)


def test_a_length_that_does_not_fit() -> None:
    sentence = refusal(gpu_memory=800 * MB, max_model_len=8192)
    assert sentence.startswith("--max-model-len 8,192 needs 512 KV blocks (360 MiB) and ")
    most = int(sentence.split("at most ")[1].split()[0].replace(",", ""))
    assert plan_smollm2(gpu_memory=800 * MB, max_model_len=most).max_model_len == most
    refusal(gpu_memory=800 * MB, max_model_len=most + 1)
    least = sentence.split("raise --gpu-memory to at least ")[1]
    assert plan_smollm2(gpu_memory=parse_bytes(least), max_model_len=8192).max_model_len == 8192


def test_a_budget_above_the_machine() -> None:
    sentence = refusal(gpu_memory=64 * 10**9)
    assert sentence == ("--gpu-memory is 59.7GiB but 20.0 GiB of the 24.0 GiB of RAM are available; "
                        "lower it to at most 20.0GiB")
    limited = replace(CPU, memory_limit=4 * GIB, memory_available=3 * GIB)
    assert "3.0 GiB of the 4.0 GiB of RAM allowed by the cgroup are available" in refusal(limited, gpu_memory=8 * GIB)
    assert "20.0 GiB of the 24.0 GiB on A GPU are free" in refusal(GPU, gpu_memory=64 * 10**9)


def test_a_model_above_the_machine() -> None:
    sentence = refusal(replace(CPU, memory_available=500 * MB))
    assert "477 MiB of the 24.0 GiB of RAM are available; choose a smaller model" in sentence
    small = replace(GPU, cuda=(replace(GPU.cuda[0], free=300 * MB),))
    assert "of which 90% are planned with; choose a smaller model" in refusal(small)


def test_a_length_above_the_machine() -> None:
    config = replace(SMOLLM2, max_position=1 << 20)
    sentence = refusal(config=config, max_model_len=1 << 20)
    assert "lower --max-model-len" in sentence
    assert "raise" not in sentence


def test_positions_the_model_does_not_know() -> None:
    assert refusal(max_model_len=10_000) == (
        "SmolLM2 supports at most 8,192 tokens but --max-model-len is 10,000; lower it to at most 8192"
    )


def test_blocks_that_are_too_few_or_too_many() -> None:
    assert refusal(num_gpu_blocks_override=4, max_model_len=100) == (
        "--num-gpu-blocks-override 4 is too few for a sequence of 100 tokens; at most 64 tokens fit: lower "
        "--max-model-len or raise --num-gpu-blocks-override to at least 7"
    )
    one_group_short = refusal(config=GPT_OSS, specs=GPT_OSS_SPECS, num_gpu_blocks_override=1)
    assert one_group_short.endswith("raise --num-gpu-blocks-override to at least 2")
    sentence = refusal(num_gpu_blocks_override=100_000)
    most = int(sentence.split("at most ")[1].replace(",", ""))
    assert plan_smollm2(num_gpu_blocks_override=most).num_blocks == most
    refusal(num_gpu_blocks_override=most + 1)


def test_a_step_too_small_for_a_whole_prompt() -> None:
    sentence = refusal(enable_chunked_prefill=False, max_num_batched_tokens=128, max_model_len=1000)
    assert "--no-enable-chunked-prefill" in sentence
    assert "--max-num-batched-tokens 128 is less than --max-model-len 1000" in sentence


def test_a_gpu_that_is_not_there() -> None:
    assert refusal(device="cuda").endswith("use --device cpu")


@given(st.integers(1 * MB, 10**12))
def test_sizes_are_rounded_to_the_safe_side(count: int) -> None:
    assert parse_bytes(size_flag(count)) >= count - 1
    assert parse_bytes(size_flag(count, up=False)) <= count


def test_rows_of_drafts_are_part_of_the_workspace() -> None:
    plain = workspace(SMOLLM2, "bfloat16", "cuda", False, 2048, 16, 4096)
    drafting = workspace(SMOLLM2, "bfloat16", "cuda", False, 2048, 16, 4096, samples=max_samples(16, 2048, 8))
    assert drafting.logits > plain.logits
    assert drafting.total > plain.total
    assert max_samples(16, 2048, 0) == 16
    assert max_samples(16, 2048, 4) == 80
    assert max_samples(16, 2048, 32) == 320  # no more for a small batch
    assert max_samples(256, 8192, 8) == 512  # one draft token each for a large batch
    assert max_samples(16, 40, 8) == 40
    assert max_samples(64, 8, 8) == 64


@pytest.mark.parametrize(("dtype", "copies"), [("float32", 0), ("bfloat16", 2)])
def test_only_experts_that_a_cpu_dequantises_need_memory_for_it(dtype: str, copies: int) -> None:
    """Native kernels multiply MXFP4 experts in float32 in their codes; torch's dequantise and pack one linear."""
    if dtype == "float32" and not native.multiplies_codes():
        pytest.skip("this CPU does not multiply codes")
    dense = replace(GPT_OSS, expert_format="dense")
    flags: dict[str, Any] = {"dtype": dtype, "max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    codes, plain = (make_plan(PlanRequest(**flags), config, gpt_oss.weight_specs(config), CPU)
                    for config in (GPT_OSS, dense))
    gate_up = 2 * 2880 * 2880 * ITEMSIZE[dtype]
    assert codes.workspace_bytes - plain.workspace_bytes == copies * gate_up
