"""KV blocks are whole in the tiers: any number of ranks finds those stored by another, with the same output."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover import LLM, SamplingParams
from spillover.engine.output.outputs import RequestOutput
from spillover.memory.transfer.cpu_transfers import CpuTransfers
from spillover.memory.transfer.host_pool import HostPool
from spillover.memory.transfer.link_cpu import CpuLink
from spillover.memory.transfer.link_ranks import RankPool, RanksLink
from spillover.models.sharding.shard import Shard
from support.models.hf_reference import VOCAB, greedy, save_checkpoint, tiny_model
from support.thread_engine import threads_for_ranks

OPTIONS = {"skip_tokenizer_init": True, "block_size": 8, "max_model_len": 96, "num_gpu_blocks_override": 24,
           "restore": "always"}


def ask(folder: str, prompts: list[list[int]], rounds: int = 1, **flags: Any) -> list[list[RequestOutput]]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with threads_for_ranks(), LLM(folder, **{**OPTIONS, **flags}) as llm:
        return [llm.generate(prompts, params, use_tqdm=False) for _ in range(rounds)]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(9)
    return [[rng.randrange(VOCAB) for _ in range(60)] for _ in range(5)]


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_what_two_ranks_have_stored_one_and_four_find(name: str, prompts: list[list[int]], tmp_path: Path) -> None:
    model, _ = tiny_model(name, seed=3)
    folder = str(save_checkpoint(model, tmp_path / "model"))
    expected = [greedy(model, prompt, 6) for prompt in prompts]
    disk = f"{tmp_path / 'kv'}:64MB"
    for turn, size in enumerate((2, 1, 4, 2)):
        (outputs,) = ask(folder, prompts, tensor_parallel_size=size, disk=(disk,), spill="eager")
        assert tokens(outputs) == expected
        assert (sum(output.sources.disk for output in outputs) > 0) == (turn > 0)


@pytest.mark.parametrize(("size", "flags"), [(2, {}), (4, {}), (2, {"kv_cache_dtype": "int8"}),
                                             (2, {"spill_dtype": "int8"})])
def test_blocks_come_back_from_host_memory(size: int, flags: dict[str, Any], prompts: list[list[int]],
                                           tmp_path: Path) -> None:
    """With a pool too small for all prompts, the second run restores some blocks, each rank's heads to that rank."""
    model, _ = tiny_model("qwen3", seed=3)
    folder = str(save_checkpoint(model, tmp_path))
    first, second = ask(folder, prompts, 2, tensor_parallel_size=size, host_memory="8MB", **flags)
    assert sum(output.sources.host for output in second) > 0
    if "spill_dtype" not in flags:
        assert tokens(first) == tokens(second)
    if not flags:
        assert tokens(first) == [greedy(model, prompt, 6) for prompt in prompts]


@settings(max_examples=40, deadline=None)
@given(size=st.sampled_from([2, 3, 4, 6]), kv_heads=st.sampled_from([1, 2, 6, 12]), rows=st.integers(1, 5),
       head_bytes=st.sampled_from([8, 24]), seed=st.integers(0, 99))
def test_a_slot_is_what_one_rank_would_have_written(size: int, kv_heads: int, rows: int, head_bytes: int,
                                                    seed: int) -> None:
    if kv_heads % size and size % kv_heads:
        return
    rng = np.random.default_rng(seed)
    count = 7
    whole = rng.integers(0, 256, (count, rows, kv_heads, head_bytes), dtype=np.uint8)
    heads = [range(*Shard(rank, size).kv_heads(kv_heads)) for rank in range(size)]
    parts = [np.ascontiguousarray(whole[:, :, own.start:own.stop]) for own in heads]
    pools = [RankPool(part.reshape(-1).data, own) for part, own in zip(parts, heads, strict=True)]
    transfers = CpuTransfers(HostPool())
    link = RanksLink(pools, rows, kv_heads, head_bytes, transfers)
    alone = CpuLink(whole.reshape(-1).data, rows * kv_heads * head_bytes, transfers)
    blocks = rng.permutation(np.arange(1, count))[:4].tolist()
    slots = [memoryview(bytearray(link.slot_bytes)) for _ in blocks]
    expected = [memoryview(bytearray(alone.slot_bytes)) for _ in blocks]
    link.copy_out(blocks, slots)
    alone.copy_out(blocks, expected)
    assert slots == expected
    targets = rng.permutation(np.arange(1, count))[:4].tolist()
    link.copy_in(slots, targets)
    alone.copy_in(expected, targets)
    for part, own in zip(parts, heads, strict=True):
        assert np.array_equal(part, whole[:, :, own.start:own.stop])
    with pytest.raises(ValueError, match="blocks"):
        link.copy_out([0], slots[:1])
    transfers.close()
