"""Ranks on one CUDA device: sums in rank order, the same tokens with and without CUDA graphs, and an end in time."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from spillover import LLM, SamplingParams
from spillover.engine.output.outputs import RequestOutput
from spillover.engine.parallel.parallel_runner import ParallelRunner
from spillover.engine.parallel.rank_processes import RankProcesses
from spillover.errors import SpilloverError
from spillover.kernels.cuda.peers import exchange
from spillover.kernels.cuda.peers.exchange import Exchange, buffer_bytes
from spillover.models.sharding.ranks import sum_in_order
from support import starved
from support.models.hf_reference import VOCAB, greedy, save_checkpoint, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CAPACITY = 1 << 16
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "block_size": 8, "max_model_len": 256, "device": "cuda",
                           "num_gpu_blocks_override": 200}
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "ranks_share_device": True}
SECONDS = 8.0  # within which the loss of a rank is reported, on a machine that runs other tests


class Group:
    """Ranks in one process, each on a separate stream."""

    def __init__(self, size: int) -> None:
        device = torch.device("cuda")
        self.memory = [torch.zeros(buffer_bytes(size, CAPACITY), dtype=torch.uint8, device=device)
                       for _ in range(size)]
        addresses = [each.data_ptr() for each in self.memory]
        self.ranks = [Exchange(rank, addresses, CAPACITY, device) for rank in range(size)]
        self.streams = [torch.cuda.Stream() for _ in range(size)]  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()

    def __iter__(self) -> Iterator[Exchange]:
        for rank, stream in zip(self.ranks, self.streams, strict=True):
            with torch.cuda.stream(stream):
                yield rank


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_calls_return_what_their_definitions_say(size: int, dtype: torch.dtype,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls match their definitions, also for odd sizes and those above one call; sums in one shot and in two."""
    monkeypatch.setattr(exchange, "TWO_SHOT_BYTES", 6000)
    group, rng = Group(size), random.Random(size)
    for turn in range(60):
        count = rng.choice([1, 3, 7, 8, 1000, rng.randrange(1, 4000), CAPACITY // 2 + 5, 3 * CAPACITY])
        parts = [torch.randn(count, device="cuda").to(dtype) for _ in range(size)]
        torch.cuda.synchronize()
        wanted, given = sum_in_order(parts), [part.clone() for part in parts]
        torch.cuda.synchronize()
        if turn % 3 == 0:
            found = [rank.sum(part) for rank, part in zip(group, parts, strict=True)]
            torch.cuda.synchronize()
            assert all(torch.equal(each, wanted) for each in found)
        elif turn % 3 == 1:
            gathered = [rank.gather(part) for rank, part in zip(group, parts, strict=True)]
            torch.cuda.synchronize()
            assert [len(each) for each in gathered] == [size] + [0] * (size - 1)
            assert all(torch.equal(each, part) for each, part in zip(gathered[0], given, strict=True))
        else:
            for rank, part in zip(group, parts, strict=True):
                rank.broadcast(part)
            torch.cuda.synchronize()
            assert all(torch.equal(part, given[0]) for part in parts)
    assert len({rank.calls for rank in group.ranks}) == 1
    assert len({rank.bytes for rank in group.ranks}) == 1


def test_a_captured_call_is_made_again_and_again() -> None:
    group = Group(2)
    inputs = [torch.zeros(4096, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    graphs, found = [], []
    for rank, stream, x in zip(group.ranks, group.streams, inputs, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            found.append(rank.sum(rank.sum(x + 0) * 0.5))
            graph.capture_end()
        graphs.append(graph)
    for _ in range(50):
        given = [torch.randn(4096, device="cuda") for _ in range(2)]
        for x, value in zip(inputs, given, strict=True):
            x.copy_(value)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, group.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        half = (given[0] + given[1]) * 0.5
        assert all(torch.equal(each, half + half) for each in found)
    assert [rank.calls for rank in group.ranks] == [100, 100]


def test_a_call_ends_where_another_rank_never_comes() -> None:
    group = Group(2)
    with torch.cuda.stream(group.streams[0]):
        group.ranks[0].sum(torch.zeros(8, device="cuda"))
    group.ranks[0].stop()
    begun = time.monotonic()
    torch.cuda.synchronize()
    assert time.monotonic() - begun < 5


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 17, 40, 63, 5, 30)]


def generate(folder: Path, prompts: list[list[int]], params: SamplingParams, **flags: Any) -> list[RequestOutput]:
    with LLM(folder, **{**OPTIONS, **flags}) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
        ranks = llm.stats().ranks
        assert (ranks.size, ranks.calls > 0) == ((2, True) if "tensor_parallel_size" in flags else (1, False))
    return found


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral_sliding", "mixtral", "gpt_oss"])
def test_tokens_are_those_of_hugging_face(name: str, prompts: list[list[int]], tmp_path: Path) -> None:
    model, _ = tiny_model(name, seed=3)
    folder = save_checkpoint(model, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    wanted = [greedy(model, prompt, 12) for prompt in prompts]
    for flags in ({}, {"enforce_eager": True, "max_num_batched_tokens": 16}):
        found = generate(folder, prompts, params, dtype="float32", **flags, **TWO)
        assert tokens(found) == wanted


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_are_dealt_out(name: str, prompts: list[list[int]], tmp_path: Path) -> None:
    model, _ = tiny_model(name, seed=3)
    folder = save_checkpoint(model, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    wanted = [greedy(model, prompt, 12) for prompt in prompts]
    for flags in ({}, {"enforce_eager": True, "max_num_batched_tokens": 16, "max_num_seqs": 3}):
        with LLM(folder, **{**OPTIONS, "dtype": "float32", "enable_expert_parallel": True, **flags, **TWO}) as llm:
            assert tokens(llm.generate(prompts, params, use_tqdm=False)) == wanted
            rows = llm.stats().ranks.expert_rows
        assert len(rows) == 2
        assert min(rows) > 0, "each rank has experts that were asked for"


def test_bits_do_not_depend_on_the_schedule(prompts: list[list[int]], tmp_path: Path) -> None:
    """In bfloat16, sampled in several ways, with drafts, one by one and together, the bits are the same."""
    folder = save_checkpoint(tiny_model("llama", seed=3)[0], tmp_path)
    params = [SamplingParams(temperature=index % 3 * 0.4, seed=index, max_tokens=20, ignore_eos=True, logprobs=1,
                             top_p=1.0 if index % 2 else 0.9, prompt_logprobs=1) for index in range(len(prompts))]
    scheduled = []
    for flags in ({}, {"max_num_seqs": 1}, {"enforce_eager": True, "max_num_batched_tokens": 16},
                  {"async_scheduling": False},
                  {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}):
        with LLM(folder, **{**OPTIONS, "dtype": "bfloat16", **flags, **TWO}) as llm:
            found = llm.generate(prompts, params, use_tqdm=False)
        scheduled.append([(output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs)
                          for output in found])
    assert all(each == scheduled[0] for each in scheduled)


@pytest.mark.parametrize(("name", "strategy"), [
    ("llama", "sequential"), ("qwen3-moe", "demand"), ("gpt-oss", "experts"), ("mixtral", "sequential")])
def test_ranks_stream_and_page_weights_that_do_not_fit(name: str, strategy: str, tmp_path: Path) -> None:
    """Each rank moves its own part; random weights are equal for the same number of ranks."""
    folder, flags = starved.write_config(tmp_path, name), {"device": "cuda", "dtype": "bfloat16", **TWO}
    whole = starved.answer(folder, starved.prompts(4), gpu_memory="2GB", weights="resident", **flags)
    smallest = starved.least(folder, weights=strategy, **flags)
    found = starved.answer(folder, starved.prompts(4), gpu_memory=str(smallest), weights=strategy, **flags)
    assert found.tokens == whole.tokens
    assert found.traffic.bytes_moved > 0


@pytest.mark.parametrize("flags", [{}, {"spill_dtype": "int8"}, {"kv_cache_dtype": "fp8"}])
def test_blocks_are_whole_in_the_tiers(flags: dict[str, Any], prompts: list[list[int]], tmp_path: Path) -> None:
    """Blocks stored on disk by two ranks are found by one rank, and vice versa."""
    model, _ = tiny_model("llama", seed=3)
    folder = save_checkpoint(model, tmp_path / "model")
    long = [prompt * 3 for prompt in prompts[1:4]]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    said: list[list[list[int]]] = []
    for turn, ranks in enumerate((TWO, {}, TWO)):
        with LLM(folder, **{**OPTIONS, "num_gpu_blocks_override": 32, "dtype": "float32",
                            "host_memory": "8MB", "disk": [f"{tmp_path / 'kv'}:64MB"], "spill": "eager",
                            "restore": "always", **flags, **ranks}) as llm:
            for _ in range(2):
                found = llm.generate([[token] for token in long[0][:1]] + long, params, use_tqdm=False)[1:]
                said.append(tokens(found))
            sources = [output.sources for output in found if output.sources is not None]
            assert sum(source.host + source.disk for source in sources) > 0, "nothing was restored"
            assert turn == 0 or sum(source.computed for source in sources) < sum(map(len, long))
    assert all(each == said[0] for each in said)
    if not flags:
        assert said[0] == [greedy(model, prompt, 8) for prompt in long]


def generate_for_ever(llm: LLM, params: SamplingParams) -> None:
    while True:
        llm.generate([[5, 6, 7], [8, 9]], params, use_tqdm=False)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_told_in_time(fault: signal.Signals, tmp_path: Path) -> None:
    folder = save_checkpoint(tiny_model("llama", seed=3)[0], tmp_path)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    llm = LLM(folder, **OPTIONS, **TWO)
    runner = llm.engine.runner
    assert isinstance(runner, ParallelRunner)
    others = runner._others
    assert isinstance(others, RankProcesses)
    try:
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
        psutil.Process(others.pids[0]).send_signal(fault)
        begun = time.monotonic()
        with pytest.raises(SpilloverError, match="rank 1"):
            generate_for_ever(llm, params)
        assert time.monotonic() - begun < SECONDS
    finally:
        llm.close()
