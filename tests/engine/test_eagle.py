"""An EAGLE-3 head drafts what its definition says, from state that lies in the KV blocks; the text stays the same."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from spillover import LLM, SamplingParams
from support.eagle_heads import ReferenceHead, head_config, head_tensors, write_head
from support.hf_reference import save_checkpoint, tiny_model
from support.watched_drafts import WatchedDrafts


@dataclass(frozen=True)
class Pair:
    """A model, a head for it, and both by the definition."""

    target: Path
    head: Path
    reference: ReferenceHead


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"norm_before_residual": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0, 2]}},
    "mistral_sliding": {"norm_before_fc": True, "norm_output": True},
}


def pair_of(folder: Path, target: PreTrainedModel, draft_vocab: int, **more: Any) -> Pair:
    tensors = head_tensors(target, draft_vocab)
    if more.get("norm_before_fc"):
        tensors["input_norm.weight"] = torch.rand(3 * target.config.hidden_size) + 0.5
    config = head_config(target, tensors, **more)
    flat = {**config, **more.get("eagle_config", {})}
    return Pair(folder / "target", write_head(folder / "head", config, tensors), ReferenceHead(target, flat, tensors))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    made = {}
    for name, more in VARIANTS.items():
        folder = tmp_path_factory.mktemp(name)
        target, _ = tiny_model(name)
        save_checkpoint(target, folder / "target")
        made[name] = pair_of(folder, target, 200, **more)
    return made


def load(pair: Pair, count: int | None = 4, **flags: Any) -> LLM:
    config = None if count is None else {"method": "eagle3", "model": str(pair.head), "num_speculative_tokens": count,
                                         "adaptive": flags.pop("adaptive", False)}
    return LLM(pair.target, **{"device": "cpu", "block_size": 8, "max_model_len": 96, "watermark": 0.0, "seed": 3,
                               "speculative_config": config, **flags})


def asked(rng: random.Random, count: int, shared: int = 0, vocab: int = 256) -> list[dict[str, list[int]]]:
    start = [rng.randrange(vocab) for _ in range(shared)]
    return [{"prompt_token_ids": start + [rng.randrange(vocab) for _ in range(rng.randint(1, 30))]}
            for _ in range(count)]


@pytest.mark.parametrize(("name", "count", "flags"), [
    ("llama", 1, {"max_num_batched_tokens": 16}),
    ("llama", 5, {"max_num_batched_tokens": 23, "num_gpu_blocks_override": 13, "enable_prefix_caching": False}),
    ("qwen3", 2, {"max_num_batched_tokens": 512}),
    ("qwen3", 4, {"max_num_batched_tokens": 17, "host_memory": "1MB", "num_gpu_blocks_override": 13}),
    ("mistral_sliding", 3, {"max_num_batched_tokens": 19}),
])
def test_drafts_are_those_of_the_definition(pairs: dict[str, Pair], name: str, count: int,
                                            flags: dict[str, Any]) -> None:
    """Over chunks of prompts, preemptions, prefixes from the cache and from a tier; greedy and sampled."""
    pair, rng = pairs[name], random.Random(count)
    prompts = asked(rng, 5) + asked(rng, 3, shared=24)
    params = [SamplingParams(temperature=index % 2 * 0.7, seed=index, max_tokens=14, ignore_eos=True)
              for index in range(8)]
    with load(pair, count, async_scheduling=False, skip_tokenizer_init=True, max_num_seqs=4, **flags) as llm:
        watched = WatchedDrafts.of(llm.engine.runner)
        outputs = [output for _ in range(2) for output in llm.generate(prompts, params, use_tqdm=False)]
        llm.engine.scheduler.check()
        sources = [output.sources for output in outputs]
    assert watched.check(pair.reference) > len(watched.drafts) / 2 > 40
    assert {len(found) for _, found, _ in watched.drafts} == set(range(1, count + 1))
    if "num_gpu_blocks_override" in flags:
        assert sum(output.num_preemptions for output in outputs) > 0
    if flags.get("enable_prefix_caching", True):
        assert any(True in flag for tokens, flag in watched.zeros.items() if len(tokens) > 8), "no prefix was found"
    if "host_memory" in flags:
        assert any(source is not None and source.host for source in sources)
