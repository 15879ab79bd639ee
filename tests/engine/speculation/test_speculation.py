"""Text and log probabilities are the same with and without speculation, whatever the drafts and the load."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from spillover import LLM, SamplingParams
from spillover.engine.output.outputs import DraftCounts
from spillover.engine.requests.request import Request
from spillover.engine.speculation.drafters.drafter import Draft, Drafter
from spillover.engine.speculation.speculator import AdaptiveSpeculator
from spillover.errors import SpilloverError
from support.mixed_requests import COUNT, facts, params_of, prompts_of
from support.models.text_model import write_text_model
from support.models.tiny_configs import WINDOWED

MIXTURE = {
    "architectures": ["MixtralForCausalLM"], "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 128, "eos_token_id": 257,
    "torch_dtype": "float32", "tie_word_embeddings": False,
}
ARCHITECTURES = {"text": {}, "windowed": {**WINDOWED, "vocab_size": 320, "eos_token_id": 257}, "mixture": MIXTURE}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_text_model(folder)
    return folder


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the flags of a model; all models have the byte tokenizer."""
    if request.param == "text":
        return {"model": texts}
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "config.json").write_text(json.dumps(ARCHITECTURES[request.param]))
    return {"model": folder, "tokenizer": str(texts), "load_format": "dummy"}


def load(model: dict[str, Any], **flags: Any) -> LLM:
    return LLM(**{"device": "cpu", "block_size": 8, "max_model_len": 96, "watermark": 0.0, "seed": 3, **model, **flags})


@dataclass
class Knowing:
    """Drafts the output of another run, with random mistakes, so that any number of draft tokens is accepted."""

    answers: dict[tuple[int, ...], list[list[int]]]
    rng: random.Random
    expected = None
    sequential = False

    def propose(self, requests: Sequence[tuple[Request, int]]) -> list[Draft]:
        return [self._draft(request, most) for request, most in requests]

    def end(self, request: Request) -> None:
        pass

    def _draft(self, request: Request, most: int) -> Draft:
        known, said = self.answers.get(tuple(request.prompt_token_ids), []), request.output_token_ids
        coming = next((one[len(said):] for one in known if one[:len(said)] == said), [])[:self.rng.randint(0, most)]
        tokens = tuple(self.rng.randrange(300) if self.rng.random() < 0.15 else token for token in coming)
        return Draft(tokens, (0.9,) * len(tokens))


def drafters(answers: dict[tuple[int, ...], list[list[int]]]) -> dict[str, tuple[dict[str, Any], Drafter | None]]:
    return {
        "knowing": ({"num_speculative_tokens": 7}, Knowing(answers, random.Random(5))),
        "ngram": ({"num_speculative_tokens": 3}, None),
        "suffix": ({"num_speculative_tokens": 11}, None),
    }


CONDITIONS: dict[str, dict[str, Any]] = {
    "knowing": {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 33, "max_num_seqs": 10,
                "host_memory": "1MB", "spill": "eager"},
    "ngram": {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 64, "async_scheduling": False,
              "enable_prefix_caching": False},
    "suffix": {"num_gpu_blocks_override": 400, "max_num_batched_tokens": 256, "batching": "static"},
}


def test_64_mixed_requests_are_the_same_with_and_without(model: dict[str, Any]) -> None:
    rng = random.Random(11)
    prompts, params = prompts_of(rng), [params_of(rng) for _ in range(COUNT)]
    with load(model, num_gpu_blocks_override=400) as llm:
        plain = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        assert llm.stats().speculation is None
    answers: dict[tuple[int, ...], list[list[int]]] = {}
    for output in plain:
        answers.setdefault(tuple(output.prompt_token_ids), []).extend(list(one.token_ids) for one in output.outputs)
    for name, (flags, drafter) in drafters(answers).items():
        with load(model, speculative_method=name if drafter is None else "ngram", speculative_adaptive=False, **flags,
                  **CONDITIONS[name]) as llm:
            scheduler = llm.engine.scheduler
            if drafter is not None:
                scheduler.speculator = AdaptiveSpeculator(drafter, flags["num_speculative_tokens"], adaptive=False)
            found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            for mine, theirs in zip(found, plain, strict=True):
                assert facts(mine) == facts(theirs), name
            stats = llm.stats()
            assert stats.speculation is not None
            counts = stats.speculation.counts
            assert counts.accepted > 0
            assert counts == sum((output.drafts for output in found), DraftCounts())
            assert stats.preemptions > 0 or name != "ngram"
            scheduler.check()
            assert stats.cache.free + stats.cache.evictable == stats.cache.total


def test_streams_that_are_left_early_harm_nobody(texts: Path) -> None:
    """Streams read to the end are as without speculation; abandoned streams begin as without it."""
    prompts = [[65 + index, 66] * 5 for index in range(6)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with load({"model": texts}) as llm:
        plain = [llm.generate({"prompt_token_ids": each}, params, use_tqdm=False)[0].outputs[0] for each in prompts]
    with load({"model": texts}, speculative_method="suffix", speculative_adaptive=False,
              num_gpu_blocks_override=24) as llm:
        for index, prompt in enumerate(prompts):
            seen = []
            for output in llm.stream({"prompt_token_ids": prompt}, params):
                seen.append(list(output.outputs[0].token_ids))
                if index % 2 and len(seen) == 3:
                    break
            assert all(tokens == list(plain[index].token_ids[:len(tokens)]) for tokens in seen)
            assert index % 2 or seen[-1] == list(plain[index].token_ids)
        llm.engine.scheduler.check()


def test_adaptive_speculation_gives_the_same_text(texts: Path) -> None:
    prompts = [[65 + index, 66, 67] * 6 for index in range(5)]
    params = [SamplingParams(temperature=0.2 * (index % 2), seed=index, max_tokens=60, ignore_eos=True)
              for index in range(5)]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    with load({"model": texts}) as llm:
        plain = llm.generate(asked, params, use_tqdm=False)
    for method in ("ngram", "suffix"):
        with load({"model": texts}, speculative_config={"method": method, "num_speculative_tokens": 5}) as llm:
            for _ in range(2):
                found = llm.generate(asked, params, use_tqdm=False)
                assert [facts(one) for one in found] == [facts(one) for one in plain]


def test_simulated_acceptance_is_counted_and_labelled(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WINDOWED))
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

    def run() -> tuple[list[list[int]], DraftCounts]:
        with load({"model": tmp_path, "load_format": "dummy", "skip_tokenizer_init": True},
                  speculative_simulate="0.9,0.6,0.3", speculative_adaptive=False) as llm:
            found = llm.generate([[1, 2, 3 + index] for index in range(8)], params, use_tqdm=False)
            stats = llm.stats().speculation
            assert stats is not None
            assert stats.simulated
            return [list(one.outputs[0].token_ids) for one in found], stats.counts

    tokens, counts = run()
    assert all(len(one) == 60 for one in tokens)
    shares = [accepted / counts.drafts for accepted in counts.by_position]
    assert shares == pytest.approx([0.9, 0.6, 0.3], abs=0.12)
    assert counts.tokens_per_pass == pytest.approx(2.8, abs=0.3)
    assert run() == (tokens, counts)


@pytest.mark.parametrize(("flags", "words"), [
    ({"speculative_method": "ngrams"}, "did you mean"),
    ({"speculative_config": {"method": "eagle3"}}, "the folder of a head"),
    ({"speculative_config": {"method": "mtp"}}, "not supported"),
    ({"speculative_config": {"method": "magic"}}, "no speculative method 'magic'"),
    ({"speculative_config": {"method": "ngram", "num_speculative_token": 2}}, "num_speculative_tokens"),
    ({"speculative_config": {"num_speculative_tokens": 2}}, "needs a method"),
    ({"speculative_config": "ngram"}, "JSON object"),
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": "4"}}, "whole number"),
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}}, "from 1 to 64"),
    ({"speculative_config": {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}}, "not above"),
    ({"speculative_config": {"method": "suffix", "prompt_lookup_min": 4}}, "leave them out"),
    ({"speculative_config": {"method": "ngram"}, "speculative_method": "ngram"}, "give one"),
    ({"num_speculative_tokens": 3}, "needs a method: give --speculative-method, one of ngram, suffix, substitute, "),
    ({"speculative_adaptive": False}, "needs something .* --speculative-method, one of ngram, suffix, substitute, "),
    ({"speculative_method": "ngram", "num_speculative_tokens": 16, "max_num_batched_tokens": 16}, "do not fit"),
    ({"speculative_method": "ngram", "num_speculative_tokens": 32, "max_model_len": 32}, "do not fit"),
    ({"speculative_simulate": "0.5,0.8", "load_format": "dummy"}, "never rising"),
    ({"speculative_simulate": "often", "load_format": "dummy"}, "such as 0.8"),
    ({"speculative_simulate": "0.5"}, "random weights"),
    ({"speculative_simulate": "0.5", "load_format": "dummy", "speculative_method": "ngram"}, "contradict"),
])
def test_what_cannot_be_is_refused_in_one_sentence(texts: Path, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(SpilloverError, match=words) as refused:
        LLM(texts, **flags)
    assert "\n" not in str(refused.value)


def test_lookup_bounds_are_as_in_vllm() -> None:
    from spillover.engine.speculation.config import SpeculativeConfig

    def bounds(**keys: int) -> tuple[int, int]:
        made = SpeculativeConfig.of(json.dumps({"method": "ngram", **keys}), None, None, True, None)
        assert made is not None
        return made.lookup_min, made.lookup_max

    assert bounds(prompt_lookup_max=4) == (4, 4)
    assert bounds(prompt_lookup_min=2) == (2, 2)
    assert bounds(prompt_lookup_min=2, prompt_lookup_max=6) == (2, 6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_64_mixed_requests_are_the_same_on_a_gpu(model: dict[str, Any]) -> None:
    test_64_mixed_requests_are_the_same_with_and_without({**model, "device": "cuda"})
