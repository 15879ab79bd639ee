"""A draft model changes only the speed: tokens and log probabilities are those of a run without it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spillover import LLM, SamplingParams
from spillover.engine.output.outputs import DraftCounts
from spillover.engine.speculation.drafters.draft_model import DraftModel
from spillover.errors import SpilloverError
from support.mixed_requests import COUNT, facts, params_of, prompts_of
from support.models.text_model import write_text_model
from support.models.tiny_configs import WINDOWED


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_text_model(folder)
    return folder


@pytest.fixture(scope="module")
def similar(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose predictions mostly agree with the target's."""
    folder = tmp_path_factory.mktemp("similar")
    write_text_model(folder)
    file = folder / "model.safetensors"
    torch.manual_seed(1)
    save_file({name: weight + 0.01 * torch.randn_like(weight) for name, weight in load_file(file).items()}, file,
              metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def windowed(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model of another architecture, with sliding windows."""
    folder = tmp_path_factory.mktemp("windowed")
    (folder / "config.json").write_text(json.dumps({**WINDOWED, "vocab_size": 320, "eos_token_id": 257}))
    return folder


def load(model: Path, **flags: Any) -> LLM:
    return LLM(model, **{"device": "cpu", "block_size": 8, "max_model_len": 96, "watermark": 0.0, "seed": 3, **flags})


def draft_of(llm: LLM) -> DraftModel:
    draft = llm.engine.drafting
    assert isinstance(draft, DraftModel)
    return draft


CONDITIONS: tuple[dict[str, Any], ...] = (
    {"num_speculative_tokens": 5, "num_gpu_blocks_override": 40, "max_num_batched_tokens": 33, "max_num_seqs": 10,
     "host_memory": "1MB", "spill": "eager"},
    {"num_speculative_tokens": 2, "num_gpu_blocks_override": 26, "max_num_batched_tokens": 64,
     "async_scheduling": False, "enable_prefix_caching": False},
    {"num_speculative_tokens": 8, "num_gpu_blocks_override": 400, "max_num_batched_tokens": 256},
)


@pytest.mark.parametrize("conditions", CONDITIONS)
def test_64_mixed_requests_are_the_same_with_and_without(target: Path, similar: Path,
                                                         conditions: dict[str, Any]) -> None:
    compare(target, similar, conditions, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("conditions", CONDITIONS)
def test_64_mixed_requests_are_the_same_on_a_gpu(target: Path, similar: Path, conditions: dict[str, Any]) -> None:
    compare(target, similar, conditions, "cuda")


def compare(target: Path, similar: Path, conditions: dict[str, Any], device: str) -> None:
    rng = random.Random(11)
    prompts, params = prompts_of(rng), [params_of(rng) for _ in range(COUNT)]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    with load(target, num_gpu_blocks_override=400, device=device) as llm:
        plain = llm.generate(asked, params, use_tqdm=False)
    with load(target, device=device, speculative_model=str(similar), speculative_adaptive=False, **conditions) as llm:
        found = llm.generate(asked, params, use_tqdm=False)
        for mine, theirs in zip(found, plain, strict=True):
            assert facts(mine) == facts(theirs)
        stats = llm.stats()
        assert stats.speculation is not None
        counts = stats.speculation.counts
        assert counts == sum((output.drafts for output in found), DraftCounts())
        assert 0.2 < counts.by_position[0] / counts.drafts < 1  # random drafts would be accepted far less often
        llm.engine.scheduler.check()
        blocks = draft_of(llm).blocks
        blocks.check()
        assert blocks.kv.num_free == blocks.kv.num_total, "requests that ended hold no blocks"


def test_the_same_model_is_always_right_also_behind_prefixes_that_were_restored(target: Path) -> None:
    """The same model as drafter is always right, also after a prefix hit, a restore from the host or preemption."""
    prompts = [[65 + index // 3, *range(100, 150), 70 + index] for index in range(6)]
    params = SamplingParams(temperature=0.5, seed=1, max_tokens=24, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    with load(target, speculative_model=str(target), speculative_adaptive=False, num_gpu_blocks_override=30,
              host_memory="1MB", spill="eager") as llm:
        for _ in range(3):
            llm.generate(asked, params, use_tqdm=False)
        stats = llm.stats()
        assert stats.speculation is not None
        counts = stats.speculation.counts
        assert counts.tokens > 100
        assert counts.accepted == counts.tokens
        cache = draft_of(llm).blocks.kv.stats
        assert cache.hit_tokens > 0, "a prefix that the draft model has seen is not computed again"
        draft_of(llm).blocks.check()


def test_prefixes_are_drafted_from_within_one_salt_only(target: Path) -> None:
    prompt = {"prompt_token_ids": list(range(65, 113))}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with load(target, speculative_model=str(target), speculative_adaptive=False) as llm:
        hits = []
        for salt in ("a", "b", "a"):
            llm.generate([prompt], params, use_tqdm=False, cache_salt=salt)
            hits.append(draft_of(llm).blocks.kv.stats.hit_tokens)
        llm.reset_prefix_cache()
        llm.generate([prompt], params, use_tqdm=False, cache_salt="a")
        hits.append(draft_of(llm).blocks.kv.stats.hit_tokens)
        draft_of(llm).blocks.check()
    assert hits[0] == hits[1] == 0
    assert hits[2] > 0
    assert hits[3] == hits[2], "what was forgotten is not found"


def test_missing_kv_is_computed_some_rows_at_a_time(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt delays no step: a request has no draft until the draft model has computed its whole prompt."""
    monkeypatch.setattr("spillover.engine.speculation.drafters.draft_model.CATCH_UP_ROWS", 16)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with load(target, speculative_model=str(target), speculative_adaptive=False) as llm:
        draft, largest = draft_of(llm), []
        launch = draft.runner.launch
        monkeypatch.setattr(draft.runner, "launch", lambda step: largest.append(step.num_tokens) or launch(step))
        (found,) = llm.generate([{"prompt_token_ids": list(range(60, 120))}], params, use_tqdm=False)
        assert max(largest) == 16
        assert found.drafts.accepted == found.drafts.tokens > 10


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_model_of_another_architecture_may_draft(target: Path, windowed: Path, adaptive: bool) -> None:
    prompts = [{"prompt_token_ids": [65 + index] * 40} for index in range(5)]
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=40, ignore_eos=True)
    flags: dict[str, Any] = {"load_format": "dummy"}
    with load(target, **flags) as llm:
        plain = llm.generate(prompts, params, use_tqdm=False)
    with load(target, **flags, speculative_config={"method": "draft_model", "model": str(windowed),
                                                   "num_speculative_tokens": 3, "adaptive": adaptive}) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
        assert [facts(one) for one in found] == [facts(one) for one in plain]
        draft_of(llm).blocks.check()


@pytest.mark.parametrize("vocab_size", [300, 320, 350])
def test_ids_that_only_one_of_them_has_harm_nobody(target: Path, tmp_path: Path, vocab_size: int) -> None:
    """Vocabularies of one family may be padded differently, and a request may contain an id that is padding."""
    config = json.loads((target / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": vocab_size}))
    prompts = [{"prompt_token_ids": [65, 319, 66, 310, 67 + index]} for index in range(4)]
    params = [SamplingParams(temperature=index % 2, seed=index, max_tokens=24, ignore_eos=True,
                             logit_bias={315: 3.0} if index > 1 else None) for index in range(4)]
    flags: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
    with load(target, **flags) as llm:
        plain = llm.generate(prompts, params, use_tqdm=False)
    with load(target, **flags, speculative_model=str(tmp_path), speculative_adaptive=False) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
    assert [facts(one) for one in found] == [facts(one) for one in plain]
    assert sum(one.drafts.tokens for one in found) > 0


def test_the_draft_model_is_part_of_the_budget(target: Path, similar: Path) -> None:
    with load(target, gpu_memory="64MB") as llm:
        alone = llm.plan
    with load(target, gpu_memory="64MB", speculative_model=str(similar)) as llm:
        plan = llm.plan
        assert plan.draft is not None
        assert plan.draft.weight_bytes == draft_of(llm).runner.weight_bytes == alone.weight_bytes
        assert plan.device_bytes <= 64e6
        assert plan.num_blocks < alone.num_blocks
        assert plan.draft.token_capacity >= plan.token_capacity


def test_it_sleeps_and_wakes_up(target: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with load(target, speculative_model=str(target), speculative_adaptive=False) as llm:
        before = llm.generate([{"prompt_token_ids": [70] * 20}], params, use_tqdm=False)
        llm._thread.run(llm.engine.sleep)
        llm._thread.run(llm.engine.wake_up)
        after = llm.generate([{"prompt_token_ids": [70] * 20}], params, use_tqdm=False)
        assert facts(before[0]) == facts(after[0])
        draft_of(llm).blocks.check()


@pytest.mark.parametrize(("flags", "words"), [
    ({"speculative_model": "/no/such/model"}, "draft model cannot be used"),
    ({"speculative_method": "draft_model"}, "needs a model that drafts"),
    ({"speculative_method": "ngram", "speculative_model": "x"}, "needs no model"),
    ({"speculative_config": {"method": "draft_model", "model": 3}}, "path or a name"),
    ({"speculative_config": {"method": "draft_model", "modle": "x"}}, "did you mean"),
    ({"speculative_config": {"method": "ngram"}, "speculative_model": "x"}, "give one"),
    ({"speculative_model": "UNKNOWN"}, "draft model cannot be used.*architecture"),
    ({"speculative_model": "LARGE", "gpu_memory": "64MB"}, "draft model.*does not fit|smaller draft model"),
    ({"speculative_model": "TARGET", "num_speculative_tokens": 16, "max_num_batched_tokens": 16}, "do not fit"),
    ({"speculative_model": "TARGET", "load_format": "null"}, "no model for which a draft model"),
    ({"speculative_model": "WIDE", "load_format": "dummy", "skip_tokenizer_init": True}, "it is unknown which agree"),
])
def test_what_cannot_be_is_refused_in_one_sentence(target: Path, tmp_path: Path, flags: dict[str, Any],
                                                   words: str) -> None:
    config = json.loads((target / "config.json").read_text())
    made = {"TARGET": {}, "UNKNOWN": {"architectures": ["NobodysForCausalLM"]}, "WIDE": {"vocab_size": 9000},
            "LARGE": {"hidden_size": 4096, "intermediate_size": 8192}}
    if flags.get("speculative_model") in made:
        (tmp_path / "config.json").write_text(json.dumps({**config, **made[flags["speculative_model"]]}))
        flags = {**flags, "speculative_model": str(tmp_path)}
    with pytest.raises(SpilloverError, match=words) as refused:
        load(target, **flags)
    assert "\n" not in str(refused.value)
