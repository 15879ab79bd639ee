"""A sharded model has the tokens of Hugging Face transformers, and the same bits under every schedule."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from spillover import LLM, SamplingParams
from spillover.engine.assemble import make_runner
from spillover.engine.planned import plan_model
from spillover.engine.replay import play, read, recorded
from spillover.engine.requests.request import Request
from spillover.kernels import native
from spillover.kernels.formats.gguf_codes import GgufCodes
from support import starved
from support.mixed_requests import facts, params_of, prompts_of
from support.models.gguf_models import write_tiled_mixture
from support.models.hf_reference import VOCAB, all_architectures, greedy, save_checkpoint, tiny_model
from support.models.made_up_checkpoint import made_up
from support.thread_engine import thread_llm, threads_for_ranks

MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")
OPTIONS = {"skip_tokenizer_init": True, "block_size": 8, "max_model_len": 128, "num_gpu_blocks_override": 200}


@dataclass(frozen=True)
class Case:
    folder: str
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @lru_cache
    def case(name: str) -> Case:
        model, _ = tiny_model(name, seed=3)
        folder: Path = save_checkpoint(model, tmp_path_factory.mktemp(name))
        rng = random.Random(name)
        shared = [rng.randrange(VOCAB) for _ in range(30)]
        prompts = [shared[:rng.randint(0, 30)] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
                   for _ in range(6)]
        return Case(str(folder), prompts, [greedy(model, prompt, 12) for prompt in prompts])
    return case


def tokens(llm: LLM, prompts: list[list[int]], count: int = 12) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize(("name", "size", "experts"), [
    *((name, 2, False) for name in all_architectures()), *((name, 2, True) for name in MIXTURES), ("llama", 4, False),
    ("qwen2", 4, False), ("mixtral", 4, False)])
def test_tokens_are_those_of_hugging_face(cases: Any, name: str, size: int, experts: bool) -> None:
    """Tokens are equal in a mixed batch with chunks, a shared prefix and random preemption."""
    case = cases(name)
    rng = random.Random(f"{name}{size}")
    with thread_llm(case.folder, tensor_parallel_size=size, enable_expert_parallel=experts, max_num_batched_tokens=23,
                    **OPTIONS) as llm:
        scheduler, step = llm.engine.scheduler, llm.engine.step

        def step_and_preempt() -> list[Request]:
            if scheduler.running and rng.random() < 0.25:
                scheduler.preempt(rng.choice(scheduler.running))
            return step()

        llm.engine.step = step_and_preempt  # type: ignore[method-assign]
        assert tokens(llm, case.prompts) == case.expected
        assert scheduler.num_preemptions > 0


@pytest.mark.parametrize(("name", "size"), [("llama_biases_linear_rope", 4), ("gpt_oss", 2)])
def test_every_schedule_has_the_same_bits(cases: Any, name: str, size: int) -> None:
    """Sampled tokens and log probabilities (of prompts too) are equal with or without overlap, chunks and drafts."""
    rng = random.Random(size)
    asked = [(prompt, params) for prompt in prompts_of(rng) if not (params := params_of(rng)).stop
             and params.structured_outputs is None][:10]
    found = []
    for flags in ({}, {"max_num_batched_tokens": 11, "max_num_seqs": 3, "async_scheduling": False},
                  {"speculative_method": "ngram", "num_speculative_tokens": 3, "speculative_adaptive": False,
                   "enable_prefix_caching": False}):
        with thread_llm(cases(name).folder, tensor_parallel_size=size, **OPTIONS, **flags) as llm:
            found.append([facts(llm.generate([prompt], [params], use_tqdm=False)[0]) for prompt, params in asked[:2]]
                         + [facts(output) for output in llm.generate([prompt for prompt, _ in asked[2:]],
                                                                     [params for _, params in asked[2:]],
                                                                     use_tqdm=False)])
    assert found[0] == found[1] == found[2]


def test_a_model_that_drafts_changes_no_bit_and_steps_can_be_played_to_one_rank(cases: Any, tmp_path: Path) -> None:
    """A draft model, which only rank 0 has, changes no bit, and recorded steps can be replayed on one rank."""
    case, drafting = cases("llama"), cases("qwen2").folder
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    found = []
    for flags in ({}, {"speculative_model": drafting, "num_speculative_tokens": 2, "speculative_adaptive": False}):
        with thread_llm(case.folder, tensor_parallel_size=2, **OPTIONS, **flags) as llm:
            with recorded(llm.engine, llm.config, llm.plan, tmp_path / f"{len(found)}.steps"):
                outputs = llm.generate(case.prompts, params, use_tqdm=False)
            found.append([facts(output) for output in outputs])
            drafted = llm.stats().speculation
            assert (drafted is not None and drafted.counts.drafts > 0) == bool(flags)
    assert found[0] == found[1]
    config, steps = read(tmp_path / "0.steps")
    runner = make_runner(plan_model(config))
    try:
        assert sum(len(tokens) for result in play(runner, steps) for tokens in result.token_ids) == 12 * len(outputs)
    finally:
        runner.close()


@pytest.mark.parametrize(("name", "weights", "experts"), [
    ("llama", "sequential", False), ("qwen3-moe", "experts", True), ("mixtral", "host-experts", True),
    ("gpt-oss", "pinned", False), ("qwen3-moe-fp8", "experts", False)])
def test_weights_that_move_change_no_token(tmp_path: Path, name: str, weights: str, experts: bool) -> None:
    folder, asked = starved.write_config(tmp_path, name), starved.prompts(3)
    flags: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": experts}
    with threads_for_ranks():
        wanted = starved.answer(folder, asked, tokens=6, **flags)
        low = starved.least(folder, weights=weights, **flags)
        budget = (low + wanted.plan.weight_bytes + wanted.plan.workspace_bytes) // 2
        policy = "next-layer" if (name, weights) == ("qwen3-moe", "experts") else "lru"
        moved = starved.answer(folder, asked, tokens=6, weights=weights, gpu_memory=str(budget), policy=policy, **flags)
    assert moved.plan.placement is not None
    assert moved.tokens == wanted.tokens
    assert len(set(map(tuple, wanted.tokens))) == len(asked)
    assert moved.traffic.bytes_moved + moved.traffic.expert_hosted > 0
    assert moved.plan.device_bytes <= budget


def test_what_host_memory_has_no_room_for_is_read_from_disk_part_by_part(tmp_path: Path) -> None:
    checkpoint = made_up("mixtral")
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config))
    save_file(dict(checkpoint.tensors), tmp_path / "model.safetensors")
    flags: dict[str, Any] = {"tensor_parallel_size": 2, "load_format": "auto", "max_model_len": 96}
    asked = [prompt[:60] for prompt in starved.prompts(2)]
    asked = [[token % 384 for token in prompt] for prompt in asked]
    with threads_for_ranks():
        wanted = starved.answer(str(tmp_path), asked, tokens=4, **flags)
        low = starved.least(str(tmp_path), weights="experts", **flags)
        budget = (low + wanted.plan.weight_bytes + wanted.plan.workspace_bytes) // 2
        moved = starved.answer(str(tmp_path), asked, tokens=4, weights="experts", gpu_memory=str(budget),
                               host_memory="1MB", **flags)
    assert moved.tokens == wanted.tokens
    assert moved.traffic.disk_bytes > 0


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q8_0])
@pytest.mark.parametrize("experts", [False, True])
def test_experts_of_a_gguf_file_say_the_same(kind: Kind, experts: bool, tmp_path: Path) -> None:
    """Tokens are those of one rank; whole experts stay in codes, cut ones are dequantised if blocks would be cut."""
    model = str(write_tiled_mixture(tmp_path / "model.gguf", lambda name: kind, layers=2))
    rng = random.Random(2)
    prompts = [[rng.randrange(96) for _ in range(length)] for length in (3, 20, 31)]
    with LLM(model, **OPTIONS) as llm:
        expected = tokens(llm, prompts, 4)
    with thread_llm(model, tensor_parallel_size=2, enable_expert_parallel=experts, **OPTIONS) as llm:
        assert tokens(llm, prompts, 4) == expected
        down = llm.engine.runner.weights.resident_parts["layers.0"]["experts.down"]
        assert isinstance(down.format, GgufCodes) == (native.multiplies_codes() and (experts or kind is Kind.Q8_0))
