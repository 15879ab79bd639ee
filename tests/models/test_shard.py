"""A sharded model computes what the whole one computes, and its ranks together hold each byte of weights once."""

from __future__ import annotations

import random
import re
from collections import Counter
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from spillover.errors import SpilloverError
from spillover.models.config import ModelConfig
from spillover.models.sharding.shard import Shard, check_shard
from support.models.hf_reference import VOCAB, all_architectures, greedy, reference_logits, tiny_model
from support.models.paged_model import PagedModel, StateDict, assert_close, one_thread  # noqa: F401
from support.rank_threads import ShardedPagedModel

SIZES = [(2, False), (4, False), (2, True)]
TOLERANCE = 2e-5  # of logits with a standard deviation near 1: float32 sums in another order


@lru_cache
def reference(name: str) -> tuple[Any, StateDict, list[int], Tensor]:
    model, config = tiny_model(name)
    rng = random.Random(3)
    prompt = [rng.randrange(1, VOCAB) for _ in range(37)]
    return model, StateDict(config, model.state_dict()), prompt, reference_logits(model, prompt)


def is_mixture(checkpoint: StateDict) -> bool:
    return any("expert" in name for name in checkpoint.tensors)


@pytest.mark.parametrize(("size", "expert_parallel"), SIZES)
@pytest.mark.parametrize("name", all_architectures())
def test_logits_are_those_of_hugging_face_and_of_one_rank(name: str, size: int, expert_parallel: bool) -> None:
    _, checkpoint, prompt, expected = reference(name)
    if expert_parallel and not is_mixture(checkpoint):
        with pytest.raises(SpilloverError, match="has none"):
            check_shard(PagedModel(checkpoint).model.config, size, expert_parallel)
        return
    sharded = ShardedPagedModel(checkpoint, size, expert_parallel)
    found = sharded.step({"a": prompt})["a"]
    assert_close(found, expected)
    assert (found - PagedModel(checkpoint).step({"a": prompt})["a"]).abs().max() < TOLERANCE
    model = sharded.models[0].model
    assert sharded.ranks[0].calls == 1 + 2 * model.config.num_layers
    layers = model.config.num_layers - len(model.config.dense_layers)
    rows = len(prompt) * layers * model.config.experts_per_token if expert_parallel else 0
    assert sum(sharded.ranks[0].expert_rows) == rows
    assert all(sharded.ranks[0].expert_rows) == expert_parallel


@pytest.mark.parametrize("name", ["llama_biases_linear_rope", "qwen2_sliding", "mixtral", "gpt_oss"])
def test_bits_do_not_depend_on_the_batch_or_the_chunks(name: str) -> None:
    _, checkpoint, prompt, _ = reference(name)
    whole = ShardedPagedModel(checkpoint, 2).step({"a": prompt})["a"]
    sharded, rng, found, at = ShardedPagedModel(checkpoint, 2), random.Random(5), [], 0
    while at < len(prompt):
        size = rng.randint(1, 9)
        beside = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 5))]
        found.append(sharded.step({"b": beside, "a": prompt[at:at + size]})["a"])
        at += size
    assert torch.equal(torch.cat(found), whole)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_greedy_tokens_are_those_of_generate(name: str) -> None:
    model, checkpoint, prompt, _ = reference(name)
    sharded = ShardedPagedModel(checkpoint, 2)
    tokens = [int(sharded.step({"a": prompt})["a"][-1].argmax())]
    while len(tokens) < 24:
        tokens.append(int(sharded.step({"a": tokens[-1:]})["a"][-1].argmax()))
    assert tokens == greedy(model, prompt, 24)


class Counted(StateDict):
    """A checkpoint that counts the numbers read from each tensor."""

    def __init__(self, checkpoint: StateDict) -> None:
        super().__init__(checkpoint.config, checkpoint.tensors)
        self.counts: Counter[str] = Counter()

    def read_part(self, name: str, index: tuple[slice | int, ...]) -> Tensor:
        found = super().read_part(name, index)
        self.counts[name] += found.numel()
        return found


@pytest.mark.parametrize("name", ["llama_biases_linear_rope", "qwen2", "qwen3_moe", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_ranks_together_read_each_number_once(name: str, expert_parallel: bool) -> None:
    """Ranks together read each number once, except norms, routers and their biases, which every rank has."""
    counted = Counted(reference(name)[1])
    if expert_parallel and not is_mixture(counted):
        return
    ShardedPagedModel(counted, 2, expert_parallel)
    shared = re.compile(r"norm|mlp\.gate\.weight|router")
    expected = {key: tensor.numel() * (2 if shared.search(key) else 1) for key, tensor in counted.tensors.items()
                if key != "lm_head.weight" or not counted.config.get("tie_word_embeddings")}
    assert counted.counts == expected


def shape(heads: int, kv_heads: int, inner: int, experts: int = 0) -> ModelConfig:
    return ModelConfig("Made", 1000, 64, 2, heads, kv_heads, 16, inner, 1e-6, 1e4, 128, num_experts=experts,
                       experts_per_token=min(2, experts), expert_intermediate_size=inner if experts else 0)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 6, 8, 12, 24])
def test_ranks_hold_all_heads_and_each_token_once(kv_heads: int) -> None:
    """Query heads are divided, each with its KV head; several ranks hold one if there are fewer than ranks."""
    config = shape(24, kv_heads, 96)
    for size in (1, 2, 3, 4, 6, 8, 12, 24):
        if kv_heads % size and size % kv_heads:
            with pytest.raises(SpilloverError, match=f"{kv_heads} key/value heads"):
                check_shard(config, size, False)
            continue
        check_shard(config, size, False)
        shards = [Shard(rank, size) for rank in range(size)]
        assert [head for shard in shards for head in range(*shard.part(24))] == list(range(24))
        assert {head for shard in shards for head in range(*shard.kv_heads(kv_heads))} == set(range(kv_heads))
        for shard in shards:
            kv = range(*shard.kv_heads(kv_heads))
            assert {head * kv_heads // 24 for head in range(*shard.part(24))} == set(kv)
            assert shard.decoder(config).num_kv_heads == len(kv)
        for vocabulary in (1000, 32000, 151936, 24):
            parts = [shard.vocabulary(vocabulary) for shard in shards]
            assert [start for start, _ in parts] + [vocabulary] == [0] + [stop for _, stop in parts]
            assert max(stop - start for start, stop in parts) == shards[0].vocabulary_width(vocabulary)
            assert all(stop > start for start, stop in parts)


@pytest.mark.parametrize(("config", "size", "expert_parallel", "sentence"), [
    (shape(6, 2, 96), 4, False, "6 attention heads; it can be 1, 2, 6"),
    (shape(8, 8, 100), 8, False, "the MLP's 100 channels; it can be 1, 2, 4"),
    (shape(8, 8, 96, experts=6), 4, True, "the model's 6 experts; it can be 1, 2"),
    (shape(8, 8, 100, experts=8), 8, False, "an expert's 100 channels; it can be 1, 2, 4"),
])
def test_a_wrong_number_of_ranks_is_one_sentence(config: ModelConfig, size: int, expert_parallel: bool,
                                                 sentence: str) -> None:
    with pytest.raises(SpilloverError) as refused:
        check_shard(config, size, expert_parallel)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
