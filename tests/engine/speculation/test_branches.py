"""Branches of drafts change no text and give back every block; they are verified only where that should pay off."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover import LLM, SamplingParams
from spillover.engine.loop import LaunchedStep
from spillover.engine.output.outputs import DraftCounts
from spillover.engine.speculation.branches import Chain, LinkStats, Seconds, choose_branches
from spillover.engine.speculation.config import SpeculativeConfig
from spillover.engine.speculation.drafters.drafter import Alternative
from spillover.engine.speculation.model_speculator import ModelSpeculator
from spillover.engine.step import Step
from spillover.errors import SpilloverError
from support.mixed_requests import COUNT, facts, params_of, prompts_of
from support.models.text_model import write_text_model
from support.models.tiny_configs import WINDOWED

CONDITIONS: dict[str, dict[str, Any]] = {
    "room for all": {"num_gpu_blocks_override": 600, "max_num_batched_tokens": 512},
    "few blocks, a tier": {"num_gpu_blocks_override": 70, "max_num_batched_tokens": 160, "max_num_seqs": 12,
                           "host_memory": "1MB", "spill": "eager"},
    "streamed, no prefix cache": {"cpu_offload_gb": 30_000 / 2**30, "gpu_memory": "16MB", "max_num_seqs": 12,
                                  "max_num_batched_tokens": 96, "enable_prefix_caching": False,
                                  "async_scheduling": False},
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_text_model(folder, spread=0.05, layers=6)
    return folder


@pytest.fixture(scope="module", params=["text", "windowed"])
def model(request: pytest.FixtureRequest, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if request.param == "text":
        return {"model": texts}
    folder = tmp_path_factory.mktemp("windowed")
    (folder / "config.json").write_text(json.dumps({**WINDOWED, "intermediate_size": 64, "vocab_size": 320,
                                                     "eos_token_id": 257}))
    return {"model": folder, "tokenizer": str(texts), "load_format": "dummy"}


def load(model: dict[str, Any], branches: int | None = None, **flags: Any) -> LLM:
    config = None if branches is None else {"method": "substitute", "num_speculative_tokens": 6, "adaptive": False,
                                            "max_branches": branches}
    return LLM(**{"device": "cpu", "block_size": 8, "max_model_len": 96, "watermark": 0.0, "seed": 3,
                  "speculative_config": config, **model, **flags})


def same_with_branches(model: dict[str, Any], conditions: dict[str, dict[str, Any]], **flags: Any) -> None:
    rng = random.Random(23)
    prompts, params = prompts_of(rng), [params_of(rng) for _ in range(COUNT)]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    with load(model, num_gpu_blocks_override=400, **flags) as llm:
        plain = [facts(each) for each in llm.generate(asked, params, use_tqdm=False)]
    for name, condition in conditions.items():
        with load(model, 5, **{**flags, **condition}) as llm:
            check_limits(llm)
            found = llm.generate(asked, params, use_tqdm=False)
            assert [facts(each) for each in found] == plain, name
            stats = llm.stats()
            assert stats.speculation is not None
            assert 0 < stats.speculation.branches_accepted < stats.speculation.branches, name
            assert stats.speculation.counts == sum((each.drafts for each in found), DraftCounts())
            llm.engine.scheduler.check()
            assert stats.cache.free + stats.cache.evictable == stats.cache.total
            moved = llm.engine.runner.weight_traffic().bytes_moved
            assert (moved > 0) == name.startswith("streamed")


def check_limits(llm: LLM) -> None:
    """Assert at every step that it stays within the limits that the runner's memory is planned for."""
    limits, runner = llm.engine.scheduler.config, llm.engine.runner
    launch = runner.launch

    def checked(step: Step) -> LaunchedStep:
        assert step.num_tokens <= limits.max_num_batched_tokens
        assert len(step.items) <= limits.max_num_seqs
        assert limits.max_samples is not None
        assert sum(item.num_samples for item in step.items) <= limits.max_samples
        return launch(step)

    setattr(runner, "launch", checked)  # noqa: B010


def test_64_mixed_requests_are_the_same_with_branches(model: dict[str, Any]) -> None:
    same_with_branches(model, CONDITIONS)


def test_requests_that_arrive_while_branches_are_verified_find_room(texts: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may be scheduled while branches are verified; they keep their places in the runner's table."""
    rng, waits = random.Random(2), ModelSpeculator.waits
    monkeypatch.setattr(ModelSpeculator, "waits", lambda self, running: waits(self, running) and rng.random() < 0.5)
    asked = [{"prompt_token_ids": [index, 7, 9]} for index in range(48)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with load({"model": texts}) as llm:
        plain = [facts(each) for each in llm.generate(asked, params, use_tqdm=False)]
    with load({"model": texts}, 5, max_num_seqs=4, max_num_batched_tokens=256) as llm:
        check_limits(llm)

        def one_after_another(indices: Sequence[int]) -> list[list[object]]:
            return [facts(llm.generate(asked[index], params, use_tqdm=False)[0]) for index in indices]

        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(one_after_another, [range(first, 48, 3) for first in range(3)]))
        for first, each in enumerate(found):
            assert each == plain[first::3]
        stats = llm.stats().speculation
        assert stats is not None
        assert stats.branches_accepted > 0


def test_streams_that_are_left_early_harm_nobody(texts: Path) -> None:
    prompts = [[65 + index, 66] * 5 for index in range(8)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with load({"model": texts}) as llm:
        plain = [llm.generate({"prompt_token_ids": each}, params, use_tqdm=False)[0].outputs[0] for each in prompts]
    with load({"model": texts}, 4) as llm:
        for index, prompt in enumerate(prompts):
            seen = []
            for output in llm.stream({"prompt_token_ids": prompt}, params):
                seen.append(list(output.outputs[0].token_ids))
                if index % 2 and len(seen) == 2:
                    break
            assert all(tokens == list(plain[index].token_ids[:len(tokens)]) for tokens in seen)
            assert index % 2 or seen[-1] == list(plain[index].token_ids)
        llm.engine.scheduler.check()
        cache = llm.stats().cache
        assert cache.free + cache.evictable == cache.total


def test_branches_bring_more_tokens_per_pass(texts: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    passes = []
    for branches in (0, 4):
        with load({"model": texts}, branches, num_gpu_blocks_override=400, max_num_batched_tokens=512) as llm:
            llm.generate([{"prompt_token_ids": [index, 7, 9]} for index in range(12)], params, use_tqdm=False)
            stats = llm.stats().speculation
            assert stats is not None
            passes.append(stats.counts.drafts)
            assert (stats.branches_accepted > 0) == (branches > 0)
    assert passes[1] < passes[0]


def seconds(row: float, draft_pass: float) -> Seconds:
    """Return costs in units of a step without branches."""
    return Seconds(1.0, lambda rows: row * rows, lambda branches: draft_pass)


def chains(gaps: Sequence[Sequence[float]]) -> tuple[list[Chain], list[list[Alternative]]]:
    request: Any = None
    return ([Chain(request, len(each), 9) for each in gaps],
            [[Alternative(1000 + index, gap) for index, gap in enumerate(each)] for each in gaps])


def test_branches_begin_where_the_draft_is_unsure_if_rows_cost_little() -> None:
    unsure = [5.0, 0.1, 5.0, 0.3, 5.0, 5.0, 5.0, 5.0]
    given_chains, alternatives = chains([unsure, [7.0] * 8])
    places, length = choose_branches(given_chains, alternatives, LinkStats(), 2, seconds(1e-4, 1e-3), 1000)
    assert [(place.chain, place.at, place.token) for place in places[:2]] == [(0, 1, 1001), (0, 3, 1003)]
    assert length >= 3
    assert sum(place.chain == 0 for place in places) <= 2
    places, length = choose_branches(given_chains, alternatives, LinkStats(), 2, seconds(1e-4, 0.9), 1000)
    assert places
    assert length == 0, "a drafting pass costs nearly as much as a step"
    assert choose_branches(given_chains, alternatives, LinkStats(), 2, seconds(0.1, 1e-3), 1000) == ([], 0)
    assert choose_branches(given_chains, alternatives, LinkStats(), 2, seconds(1e-4, 1e-3), 10) == ([], 0)
    one, _ = choose_branches(given_chains, alternatives, LinkStats(), 2, seconds(1e-4, 1e-3), 20)
    assert len(one) == 1


def test_alternatives_that_are_never_right_are_no_longer_tried() -> None:
    given_chains, alternatives = chains([[0.1] * 6])
    stats = LinkStats()
    assert choose_branches(given_chains, alternatives, stats, 4, seconds(1e-3, 1e-3), 1000)[0]
    for _ in range(60):
        stats.note(alternatives[0], 2, 17)
    assert choose_branches(given_chains, alternatives, stats, 4, seconds(1e-3, 1e-3), 1000) == ([], 0)



@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(own=st.floats(0.2, 0.98), other=st.floats(0.0, 1.0), row=st.floats(0.0, 0.3), draft_pass=st.floats(0.0, 0.5),
       length=st.integers(1, 24), seed=st.integers(0, 1000))
def test_branches_are_never_slower_than_chains(own: float, other: float, row: float, draft_pass: float, length: int,
                                               seed: int) -> None:
    """Branches reach 0.97 of the speed of chains at any costs and chances, learning included."""
    rng = np.random.default_rng(seed)
    stats, tokens, spent = LinkStats(), {True: 0, False: 0}, {True: 0.0, False: 0.0}
    shares = {gap: (own ** (1 / (1 + gap)), other) for gap in (0.1, 1.2, 3.5, 7.0)}
    for _ in range(400):
        gaps = rng.choice(list(shares), length).tolist()
        right = [bool(rng.random() < shares[gap][0]) for gap in gaps]
        run = right.index(False) if False in right else length
        hit = run < length and bool(rng.random() < shares[gaps[run]][1])
        chain = 1 + row * length + draft_pass * length
        given_chains, alternatives = chains([gaps])
        costs = Seconds(chain, lambda rows: row * rows, lambda branches: draft_pass)
        places, more = choose_branches(given_chains, alternatives, stats, 4, costs, 10_000)
        lengths = {place.at: min(more, length - place.at - 1) for place in places}
        tokens[False] += run + 1
        tokens[True] += run + 1
        spent[False] += chain
        spent[True] += chain + row * sum(9 + at + 1 + count for at, count in lengths.items())
        spent[True] += draft_pass * max(lengths.values(), default=0)
        if hit and run in lengths:
            following = [bool(rng.random() < shares[gap][0]) for gap in rng.choice(list(shares), lengths[run])]
            tokens[True] += 1 + (following.index(False) if False in following else len(following))
        if places:
            stats.note(alternatives[0], run, 1000 + run if hit else -1)
    assert tokens[True] / spent[True] >= 0.97 * tokens[False] / spent[False]


@pytest.mark.parametrize(("fields", "said"), [
    ({"method": "substitute", "max_branches": 17}, "max_branches is from 0 to 16; got 17"),
    ({"method": "substitute", "max_branches": -1}, "max_branches is from 0 to 16; got -1"),
    ({"method": "substitute", "max_branches": "4"}, "whole number"),
    ({"method": "ngram", "max_branches": 4}, "max_branches applies to the method substitute, not to 'ngram'"),
])
def test_what_cannot_be_asked_for_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SpilloverError, match=said):
        SpeculativeConfig.of(json.dumps(fields), None, None, True, None)


def test_branches_are_on_where_their_number_is_chosen_by_what_pays_off() -> None:
    def most(*arguments: Any) -> int:
        made = SpeculativeConfig.of(*arguments)
        assert made is not None
        return made.max_branches

    assert most(None, "substitute", None, True, None) == 4
    assert most(None, "substitute", None, False, None) == 0
    assert most('{"method": "substitute", "adaptive": false}', None, None, True, None) == 0
    assert most('{"method": "substitute", "max_branches": 7}', None, None, False, None) == 7
    assert most(None, "suffix", None, True, None) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_64_mixed_requests_are_the_same_with_branches_on_a_gpu(tmp_path: Path) -> None:
    write_text_model(tmp_path, spread=0.05, layers=6, hidden=(256, 512))
    streamed = {"num_gpu_blocks_override": 400, "cpu_offload_gb": 4_000_000 / 2**30}
    same_with_branches({"model": tmp_path}, {"streamed": streamed}, device="cuda", dtype="bfloat16", block_size=16)
