"""Streamed layers are drafted for by rounded copies of them: text and log probabilities stay the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from spillover import LLM, SamplingParams
from spillover.engine.cpu.cpu_runner import CpuRunner
from spillover.engine.output.outputs import RequestOutput
from spillover.errors import SpilloverError
from support.models.text_model import write_text_model

COUNT = 16
# Layers stream through an arena that stands in for device memory; it has room for few blocks.
STREAMED: dict[str, Any] = {"gpu_memory": "1.7MB", "max_num_seqs": 4, "max_num_batched_tokens": 32}
CONDITIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "streamed": ("int4", STREAMED),
    "streamed, with a tier": ("int8", {**STREAMED, "gpu_memory": "1.5MB", "host_memory": "2MB", "spill": "eager"}),
    "on demand": ("int4", {"gpu_memory": "2.5MB", "cpu_offload_gb": 400_000 / 2**30, "async_scheduling": False,
                           "max_num_seqs": 8, "max_num_batched_tokens": 64, "enable_prefix_caching": False}),
    "all stay, few blocks": ("int4", {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 64}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_text_model(folder, spread=0.05, layers=6)
    return folder


def load(model: Path, rounded: str | None = None, **flags: Any) -> LLM:
    config = None if rounded is None else {"method": "substitute", "num_speculative_tokens": 6, "adaptive": False,
                                           "substitute_dtype": rounded}
    return LLM(model, **{"device": "cpu", "block_size": 8, "max_model_len": 96, "watermark": 0.0,
                         "speculative_config": config, **flags})


def requests(seed: int, sampled: bool = True) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Return prompts, some with a shared prefix, and sampling parameters of any kind."""
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(24)]
    prompts, params = [], []
    for index in range(COUNT):
        start = shared[:rng.randint(0, 24)] if rng.random() < 0.5 else []
        prompts.append({"prompt_token_ids": start + [rng.randrange(256) for _ in range(rng.randint(1, 24))]})
        kind: dict[str, Any] = rng.choice([
            {}, {}, {"repetition_penalty": 1.2}, {"top_k": 4, "top_p": 0.9}, {"logit_bias": {65: 4.0}}, {"n": 2},
            {"stop_token_ids": [70, 71, 72]}, {"structured_outputs": {"regex": "(ab|ba){2,9}"}},
        ])
        params.append(SamplingParams(temperature=rng.choice([0, 0, 0.5, 1.0]) if sampled else 0, seed=index,
                                     max_tokens=rng.randint(1, 40), ignore_eos=rng.random() < 0.7,
                                     logprobs=rng.choice([None, 0, 3]), **kind))
    return prompts, params


def facts(output: RequestOutput) -> list[object]:
    return [(one.token_ids, one.text, one.logprobs, one.finish_reason) for one in output.outputs]


@pytest.fixture(scope="module")
def plain(model: Path) -> list[list[object]]:
    prompts, params = requests(1)
    with load(model) as llm:
        return [facts(one) for one in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_any_request_is_the_same_with_and_without(model: Path, plain: list[list[object]], condition: str) -> None:
    prompts, params = requests(1)
    rounded, flags = CONDITIONS[condition]
    with load(model, rounded, **flags) as llm:
        for _ in range(2):  # the second time with prefixes from the cache or a tier
            found = llm.generate(prompts, params, use_tqdm=False)
            for mine, theirs in zip(found, plain, strict=True):
                assert facts(mine) == theirs
        stats = llm.stats()
        assert stats.speculation is not None
        counts = stats.speculation.counts
        assert 0 < counts.accepted <= counts.tokens
        moved = llm.engine.runner.weight_traffic().bytes_moved
        assert moved > 0 or condition.startswith("all stay")
        assert llm.engine.runner.weight_bytes == llm.plan.device_weight_bytes
        llm.engine.scheduler.check()
        assert stats.cache.free + stats.cache.evictable == stats.cache.total


def test_how_much_is_drafted_changes_no_text(model: Path, plain: list[list[object]]) -> None:
    prompts, params = requests(1)
    config = {"method": "substitute", "num_speculative_tokens": 6}
    with load(model, **STREAMED, speculative_config=config) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
        assert [facts(one) for one in found] == plain
        assert sum(one.drafts.tokens for one in found) > 0


def test_a_pass_over_streamed_weights_brings_several_tokens(model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    with load(model, "int8", **STREAMED) as llm:
        for index in range(4):
            llm.generate({"prompt_token_ids": [index, 7, 9]}, params, use_tqdm=False)
        assert llm.plan.substitutes is not None
        passes = llm.engine.runner.weight_traffic().bytes_moved / llm.plan.substitutes.moved
    assert 4 < passes < 4 * 48 / 2


def test_streams_that_are_left_early_harm_nobody(model: Path) -> None:
    prompts = [[65 + index, 66] * 5 for index in range(6)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with load(model) as llm:
        plain = [llm.generate({"prompt_token_ids": each}, params, use_tqdm=False)[0].outputs[0] for each in prompts]
    with load(model, "int4", **STREAMED) as llm:
        for index, prompt in enumerate(prompts):
            seen = []
            for output in llm.stream({"prompt_token_ids": prompt}, params):
                seen.append(list(output.outputs[0].token_ids))
                if index % 2 and len(seen) == 2:
                    break
            assert all(tokens == list(plain[index].token_ids[:len(tokens)]) for tokens in seen)
            assert index % 2 or seen[-1] == list(plain[index].token_ids)
        llm.engine.scheduler.check()


def test_copies_move_with_the_weights_that_they_share(model: Path) -> None:
    """When weights move, as in an engine that sleeps, so do the copies, and no freed memory stays referenced."""
    with load(model, "int4") as llm:
        runner = llm.engine.runner
        assert isinstance(runner, CpuRunner)
        assert runner.drafting is not None
        for weights in (runner.weights, runner.drafting.weights):
            weights.move(lambda tensor: tensor.clone(), asleep=False)
        shared, copies = runner.weights.resident_parts, runner.drafting.weights.resident_parts
        assert copies.keys() == shared.keys()
        for part, weights in copies.items():
            kept = {name for name, weight in weights.items() if weight is shared[part][name]}
            assert kept == {"embed": {"embedding"}, "head": {"norm"}}.get(part, set())


def test_acceptance_can_be_simulated_with_drafts_that_are_made(model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with load(model, "int4", **STREAMED, load_format="dummy", speculative_simulate="0.9,0.6,0.3") as llm:
        llm.generate([{"prompt_token_ids": [index, 2]} for index in range(8)], params, use_tqdm=False)
        stats = llm.stats().speculation
        assert stats is not None
        assert stats.simulated
        shares = [count / stats.counts.drafts for count in stats.counts.by_position]
        assert shares == pytest.approx([0.9, 0.6, 0.3], abs=0.15)
        assert stats.counts.tokens <= 3 * stats.counts.drafts


@pytest.mark.parametrize(("flags", "said"), [
    ({"method": "substitute", "substitute_dtype": "int3"}, "substitute_dtype is one of int4, int8"),
    ({"method": "ngram", "substitute_dtype": "int4"}, "substitute_dtype applies to the method substitute"),
])
def test_what_cannot_be_asked_for_is_refused(model: Path, flags: dict[str, Any], said: str) -> None:
    with pytest.raises(SpilloverError, match=said):
        LLM(model, device="cpu", speculative_config=flags)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rounded", ["int4", "int8"])
def test_any_request_is_the_same_on_a_gpu(tmp_path: Path, rounded: str) -> None:
    write_text_model(tmp_path, spread=0.05, layers=6, hidden=(256, 512))
    flags: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "block_size": 16,
                             "cpu_offload_gb": 4_000_000 / 2**30, "gpu_memory": "4GB"}
    for seed, sampled in ((1, True), (2, False)):
        prompts, params = requests(seed, sampled)
        with load(tmp_path, **flags) as llm:
            expected = [facts(one) for one in llm.generate(prompts, params, use_tqdm=False)]
        with load(tmp_path, rounded, **flags) as llm:
            for _ in range(2):
                found = [facts(one) for one in llm.generate(prompts, params, use_tqdm=False)]
                assert found == expected
            stats = llm.stats().speculation
            assert stats is not None
            assert stats.counts.accepted > 0
            runner = llm.engine.runner
            assert runner.weight_traffic().bytes_moved > 0
            assert runner.weight_bytes == llm.plan.device_weight_bytes
            llm.engine.sleep()
            llm.engine.wake_up()
            assert [facts(one) for one in llm.generate(prompts, params, use_tqdm=False)] == expected
