"""The engine's greedy tokens are those of Hugging Face transformers for every architecture and schedule."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spillover import LLM, SamplingParams
from spillover.engine.requests.request import Request
from support.models.hf_reference import VOCAB, all_architectures, greedy, save_checkpoint, tiny_model

BLOCK = 8
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "block_size": BLOCK, "max_model_len": 192,
                           "num_gpu_blocks_override": 400}


@dataclass(frozen=True)
class Case:
    folder: str
    prompts: list[list[int]]
    lengths: list[int]
    expected: list[list[int]]
    longest: list[list[int]]  # 64 tokens for each of the first two prompts


def make_prompts(rng: random.Random) -> list[list[int]]:
    """Return 32 prompts of 1 to 90 tokens; half of them share a prefix."""
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    prompts = []
    for index in range(32):
        tail = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 50))]
        prompts.append(shared[: rng.randint(1, 40)] + tail if index % 2 else tail)
    return prompts


@pytest.fixture(scope="module", params=all_architectures())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model, _ = tiny_model(request.param, seed=3)
    folder: Path = save_checkpoint(model, tmp_path_factory.mktemp(request.param))
    rng = random.Random(request.param)
    prompts = make_prompts(rng)
    lengths = [rng.randint(1, 24) for _ in prompts]
    asked = [*zip(prompts, lengths, strict=True), *((prompt, 64) for prompt in prompts[:2])]
    with LLM(str(folder), **OPTIONS) as llm:
        guesses = llm.generate([prompt for prompt, _ in asked], [params(length) for _, length in asked], use_tqdm=False)
    expected = [greedy(model, prompt, length, guess.outputs[0].token_ids)
                for (prompt, length), guess in zip(asked, guesses, strict=True)]
    return Case(str(folder), prompts, lengths, expected[:-2], expected[-2:])


def load(case: Case, **flags: object) -> LLM:
    return LLM(case.folder, **{**OPTIONS, **flags})


def params(length: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)


def test_64_tokens_one_by_one(case: Case) -> None:
    with load(case) as llm:
        for prompt, expected in zip(case.prompts, case.longest, strict=False):
            assert llm.generate(prompt, params(64), use_tqdm=False)[0].outputs[0].token_ids == expected


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_mixed_batch_chunked_at_odd_sizes_and_preempted_at_random(case: Case, prefix_caching: bool) -> None:
    rng = random.Random(case.folder + str(prefix_caching))
    with load(case, enable_prefix_caching=prefix_caching, max_num_batched_tokens=rng.choice([7, 13, 29]),
              max_num_seqs=rng.choice([5, 32]), watermark=0.0) as llm:
        scheduler, step = llm.engine.scheduler, llm.engine.step

        def step_and_preempt() -> list[Request]:
            if scheduler.running and rng.random() < 0.1:
                scheduler.preempt(rng.choice(scheduler.running))
            changed = step()
            scheduler.check()
            return changed

        llm.engine.step = step_and_preempt  # type: ignore[method-assign]
        outputs = llm.generate(case.prompts, [params(length) for length in case.lengths], use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == case.expected
        assert scheduler.num_preemptions > 0
        assert all(output.sources.total == len(output.prompt_token_ids) for output in outputs)
        again = llm.generate(case.prompts, [params(length) for length in case.lengths], use_tqdm=False)
        assert [output.outputs[0].token_ids for output in again] == case.expected
        hits = sum(output.sources.device for output in again)
        assert (hits > 0) == prefix_caching


def test_a_pool_too_small_for_the_batch_preempts_and_changes_nothing(case: Case) -> None:
    with load(case, num_gpu_blocks_override=120, max_model_len=128, max_num_batched_tokens=31, watermark=0.0) as llm:
        outputs = llm.generate(case.prompts, [params(length) for length in case.lengths], use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == case.expected
        stats = llm.stats().cache
        assert stats.free + stats.evictable == stats.total
