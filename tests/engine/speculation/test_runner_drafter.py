"""A second runner drafts in the blocks of the first: the text stays the same, whatever the second runner's weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from spillover import LLM, SamplingParams
from spillover.engine.batch.request_table import StepLimits
from spillover.engine.cpu.cpu_runner import CpuRunner
from spillover.engine.speculation.drafters.runner_drafter import RunnerDrafter, SharedBlocks
from spillover.engine.speculation.speculator import AdaptiveSpeculator
from spillover.engine.weights.placed import FixedWeights
from spillover.kernels.formats.base import Linear, Weight
from support.models.text_model import write_text_model

TOKENS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_text_model(folder, spread=0.05)
    return folder


def load(model: Path, **flags: Any) -> LLM:
    return LLM(model, device="cpu", block_size=8, max_model_len=96, watermark=0.0, seed=3, **flags)


def drafting(llm: LLM, noise: float) -> None:
    """Make a second runner draft, with layer weights that differ by `noise`."""
    engine, runner = llm.engine, llm.engine.runner
    assert isinstance(runner, CpuRunner)
    assert isinstance(runner.weights, FixedWeights)
    scheduler = engine.scheduler

    def changed(weight: Weight) -> Weight:
        if not isinstance(weight, Linear) or not noise:
            return weight
        return weight.map(lambda tensor: tensor * (1 + noise * (tensor * 1e4).sin()))

    parts = {part: {name: changed(weight) if part.startswith("layers.") else weight for name, weight in each.items()}
             for part, each in runner.weights.parts.items()}
    limits = StepLimits(scheduler.config.max_num_seqs, scheduler.config.max_num_seqs, scheduler.config.max_model_len)
    second = CpuRunner(runner.model, FixedWeights(parts), runner.kv, 8, limits, runner.transfers, shared_with=runner)
    drafter = RunnerDrafter(second, SharedBlocks(scheduler.kv), limits.max_num_batched_tokens)
    speculator = AdaptiveSpeculator(drafter, TOKENS, adaptive=False)
    scheduler.speculator = scheduler._drafts._speculator = speculator
    object.__setattr__(scheduler.config, "drafts_in_kv", True)


@pytest.mark.parametrize("noise", [0.0, 0.3, 3.0])
def test_text_is_the_same_and_equal_weights_are_always_right(model: Path, noise: float) -> None:
    rng = random.Random(4)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 40))] for _ in range(20)]
    params = [SamplingParams(temperature=rng.choice([0, 0.7, 1.0]), seed=index, max_tokens=rng.randint(1, 40),
                             ignore_eos=True, logprobs=rng.choice([None, 2]), top_k=rng.choice([0, 30]),
                             top_p=rng.choice([1.0, 0.8]), min_p=rng.choice([0, 0.01]),
                             logit_bias=rng.choice([None, {65: 3.0}])) for index in range(20)]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    with load(model) as llm:
        plain = llm.generate(asked, params, use_tqdm=False)
    with load(model, speculative_method="ngram", num_speculative_tokens=TOKENS, num_gpu_blocks_override=60) as llm:
        drafting(llm, noise)
        for _ in range(2):  # the second time with cached prefixes
            found = llm.generate(asked, params, use_tqdm=False)
            for mine, theirs in zip(found, plain, strict=True):
                assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
                assert mine.outputs[0].logprobs == theirs.outputs[0].logprobs
        stats = llm.stats()
        assert stats.speculation is not None
        counts = stats.speculation.counts
        assert counts.tokens > 0
        if not noise:
            assert counts.accepted == counts.tokens
        else:
            assert 0 < counts.accepted < counts.tokens
        llm.engine.scheduler.check()
