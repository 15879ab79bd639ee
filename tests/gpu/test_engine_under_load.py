"""On a CUDA device, an overloaded engine: graphs, preemption, paged experts, KV in expert slots and tiers change no
token, and each of them is really used."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from spillover import LLM, SamplingParams
from spillover.engine.weights.traffic import WeightTraffic
from support import starved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

# A request's bits are the same whichever requests share its steps, and however its prompt is chunked.
FLAGS: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "block_size": 16,
                         "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 160, "max_num_seqs": 6,
                         "max_num_batched_tokens": 64, "watermark": 0.0}
POOLS = {"llama": 20, "qwen3-moe": 20, "gpt-oss": 28}  # blocks: few enough that some of the requests are preempted

Tokens = list[list[tuple[int, ...]]]  # by request, by sequence


@dataclass(frozen=True)
class Served:
    tokens: Tokens
    graphs: int | None  # None if the engine captures none
    preemptions: int
    traffic: WeightTraffic


def random_requests(seed: int, count: int = 24) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return requests of all lengths and ways to sample; the last one runs on alone when the others have finished."""
    rng = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
        {"temperature": 0, "logprobs": 2}, {"temperature": 0, "repetition_penalty": 1.3}, {"temperature": 0.5, "n": 2},
    ]
    asked = [[rng.randrange(starved.VOCABULARY) for _ in range(rng.randint(1, 100))] for _ in range(count)]
    lengths = [*(rng.randint(1, 30) for _ in range(count - 1)), 55]
    return asked, [SamplingParams(**rng.choice(kinds), seed=index, max_tokens=length, ignore_eos=True)
                   for index, length in enumerate(lengths)]


def generated(llm: LLM, asked: list[list[int]], params: list[SamplingParams] | SamplingParams) -> Tokens:
    outputs = llm.generate(asked, params, use_tqdm=False)
    return [[tuple(each.token_ids) for each in output.outputs] for output in outputs]


def serve(folder: str, seed: int, **flags: Any) -> Served:
    with LLM(folder, **{**FLAGS, **flags}) as llm:
        tokens = generated(llm, *random_requests(seed))
        stats, runner = llm.engine.runner.graph_stats, llm.engine.runner
        llm.engine.scheduler.check()
        return Served(tokens, None if stats is None else stats.graphs, llm.engine.scheduler.num_preemptions,
                      runner.weight_traffic())


def budget(folder: str, share: float) -> int:
    """Return bytes of device memory: `share` of the way from the least with paged experts to room for all experts."""
    least = starved.least(folder, weights="experts", **FLAGS)
    plan = starved.answer(folder, [], gpu_memory="2GB", weights="resident", **FLAGS).plan
    return least + int(share * (plan.weight_bytes + plan.workspace_bytes - least))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_random_requests_have_the_same_tokens_with_and_without_graphs(name: str, seed: int, tmp_path: Path) -> None:
    folder = starved.write_config(tmp_path, name)
    ample = serve(folder, seed, enforce_eager=True, gpu_memory="2GB", enable_prefix_caching=False)
    assert (ample.graphs, ample.preemptions) == (None, 0)
    for flags in ({"enforce_eager": True}, {}, {"graph_capture": "start"}, {"async_scheduling": False}):
        found = serve(folder, seed, num_gpu_blocks_override=POOLS[name], **flags)
        assert found.tokens == ample.tokens, flags
        assert found.preemptions > 0, flags
        assert (found.graphs is None) == ("enforce_eager" in flags)
        assert found.graphs is None or found.graphs > 0, flags


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", starved.MIXTURES)
def test_experts_that_are_missed_are_fetched(name: str, eager: bool, tmp_path: Path) -> None:
    folder = starved.write_config(tmp_path, name)
    whole = serve(folder, 1, weights="resident", gpu_memory="2GB")
    found = serve(folder, 1, weights="experts", gpu_memory=str(budget(folder, 0.7)), enforce_eager=eager)
    assert found.tokens == whole.tokens
    assert whole.traffic == WeightTraffic()
    assert found.traffic.expert_misses > 0
    assert found.traffic.bytes_moved > 0
    assert (found.graphs is None) == eager
    assert eager or found.graphs > 0


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_kv_borrows_slots_of_experts_and_gives_them_back(name: str, eager: bool, tmp_path: Path) -> None:
    folder = starved.write_config(tmp_path, name)
    whole = serve(folder, 2, weights="resident", gpu_memory="2GB").tokens
    share = {"qwen3-moe": 0.4, "gpt-oss": 0.6}[name]  # the plan then has blocks for a third of the requests
    flags = {**FLAGS, "weights": "experts", "gpu_memory": str(budget(folder, share)), "enforce_eager": eager,
             "max_num_seqs": 24}
    with LLM(folder, **flags) as llm:
        kv, weights = llm.engine.scheduler.kv, llm.engine.runner.weights
        lender, most = kv.loans.lender, 0
        assert lender is not None
        lend = lender.lend

        def noted(blocks: int) -> list[Sequence[int]]:
            nonlocal most
            loans = lend(blocks)
            most = max(most, lender.slots)
            return loans

        lender.lend = noted
        for _ in range(2):  # slots borrowed the first time hold experts again the second
            most = 0
            assert generated(llm, *random_requests(2)) == whole
            assert most > 0, "nothing was borrowed"
            assert (kv.loans.blocks, lender.slots) == (0, 0), "not all is back once nobody needs it"
            kv.check()
            weights.experts.table.check()
        assert weights.traffic().expert_misses > 0


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_conversations_come_back_from_a_tier_under_load(name: str, tier: str, tmp_path: Path) -> None:
    """Twelve conversations of three turns share a pool for two or three; preempting and restoring change no token."""
    folder = starved.write_config(tmp_path, name)
    place = {"host_memory": "50MB"} if tier == "host" else {"disk": (f"{tmp_path / 'kv'}:200MB",)}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    restored = 0
    with LLM(folder, **FLAGS, gpu_memory="2GB", enable_prefix_caching=False) as resident, LLM(
            folder, **FLAGS, num_gpu_blocks_override=POOLS[name], restore="always", **place) as llm:
        rng = random.Random(tier)
        said = [[rng.randrange(starved.VOCABULARY) for _ in range(rng.randint(5, 50))] for _ in range(12)]
        for _ in range(3):
            outputs = llm.generate(said, params, use_tqdm=False)
            assert [[tuple(output.outputs[0].token_ids)] for output in outputs] == generated(resident, said, params)
            restored += sum(getattr(output.sources, tier) for output in outputs)
            said = [[*text, *output.outputs[0].token_ids, *(rng.randrange(starved.VOCABULARY) for _ in range(8))]
                    for text, output in zip(said, outputs, strict=True)]
        llm.engine.scheduler.check()
        assert llm.engine.scheduler.num_preemptions > 0
        (report,) = [each for each in llm.engine.scheduler.connector.reports() if each.name == tier]
    assert restored > 0
    assert report.bytes_in > 0, f"nothing went to {tier}"
    assert report.bytes_out > 0, f"nothing came back from {tier}"
