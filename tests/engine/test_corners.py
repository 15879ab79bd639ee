"""Legal but unusual: equal prompts, sequences as long as all memory, hanging tiers, failing steps, two readers."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spillover import LLM, SamplingParams
from spillover.engine.cpu.cpu_runner import CpuRunner
from spillover.engine.output.output_processor import Answer
from spillover.errors import PlanError, RequestError, SpilloverError
from spillover.memory.spill.tiered_connector import TieredConnector
from spillover.memory.tiers.segment import Segment

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "max_position_embeddings": 4096, "tie_word_embeddings": False, "hidden_act": "silu",
    "eos_token_id": 2, "torch_dtype": "float32",
}
BLOCK_BYTES = 8192  # of a block of 16 tokens


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path / "model")


def made(folder: str, **flags: Any) -> LLM:
    return LLM(folder, **{"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 4,
                          "max_num_batched_tokens": 64, "num_gpu_blocks_override": 64, "max_model_len": 256, **flags})


def greedy(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


def begin(llm: LLM, prompt: list[int], tokens: int, priority: int = 0) -> Answer:
    """Start a request without waiting for its answer: the test runs the steps itself."""
    answer = llm._answer(prompt, greedy(tokens), priority, None)
    for request in answer.requests:
        llm.engine.scheduler.add(request)
    return answer


def step(llm: LLM) -> None:
    steps = llm.engine.num_steps
    if not llm.engine.step() and llm.engine.num_steps == steps:
        llm.engine.wait(0.005)


def drawn(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(count)]


@pytest.mark.parametrize("below", [{}, {"host_memory": str(32 * BLOCK_BYTES)}], ids=["device", "host"])
def test_one_of_two_equal_prompts_may_grow_to_the_last_block(folder: str, below: dict[str, str]) -> None:
    """Of two equal prompts computed separately, one may grow although the tree kept the finished one's blocks."""
    prompt = list(range(3, 68))
    with made(folder, num_gpu_blocks_override=16, max_num_batched_tokens=256, **below) as llm:
        outputs = llm.generate([prompt, prompt], [greedy(1), greedy(180)], use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 180]
        llm.engine.scheduler.check()


@pytest.mark.parametrize("host_blocks", [16, 20, 32])
def test_a_length_that_is_planned_is_reached(folder: str, host_blocks: int) -> None:
    """The planned maximum length is reached; host memory counts in whole groups of sixteen blocks."""
    flags = {"num_gpu_blocks_override": 32, "host_memory": str(host_blocks * BLOCK_BYTES)}
    longest = (32 + host_blocks // 16 * 16) * 16
    with pytest.raises(PlanError, match=f"at most {longest:,} tokens fit"):
        made(folder, max_model_len=longest + 16, **flags)
    with made(folder, max_model_len=longest, **flags) as llm:
        tokens = llm.generate([drawn(0, 200)], greedy(longest), use_tqdm=False)[0].outputs[0].token_ids
        assert 200 + len(tokens) == longest


def test_a_sequence_may_outgrow_the_device_after_a_restore(folder: str) -> None:
    base, other = drawn(1, 38 * 16 + 1), drawn(2, 38 * 16)
    longer = base[:-1] + drawn(3, 200)
    flags = {"num_gpu_blocks_override": 40, "max_model_len": 56 * 16, "host_memory": str(200 * BLOCK_BYTES),
             "restore": "always"}
    with made(folder, **flags) as llm:
        expected = llm.generate([longer], greedy(8), use_tqdm=False)[0].outputs[0].token_ids
    with made(folder, **flags) as llm:
        for prompt in (base, other, [7] * 600):
            llm.generate([prompt], greedy(8), use_tqdm=False)
        output = llm.generate([longer], greedy(8), use_tqdm=False)[0]
        assert output.sources.host == 38 * 16
        assert output.outputs[0].token_ids == expected
        assert len(expected) == 8


def test_a_request_that_ends_between_steps_is_told_of(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with made(folder, num_gpu_blocks_override=32, max_model_len=1024, host_memory=str(32 * BLOCK_BYTES)) as llm:
        monkeypatch.setattr(llm.engine.scheduler.connector, "offload", lambda *_: False)  # no room in host memory
        request = begin(llm, drawn(0, 200), 800).requests[0]
        told: list[object] = []
        while llm.engine.has_work:
            told += llm.engine.step()
        assert told.count(request) == len(request.output_token_ids) + 1
        assert told[-1] is request
        assert request.finish_reason == "length"


@pytest.mark.parametrize("first", ["important", "other"])
def test_the_less_important_is_preempted(folder: str, first: str) -> None:
    """The less important request is preempted, also if both need a block in the same step."""
    prompts = {"important": list(range(3, 63)), "other": list(range(103, 163))}
    order = ["important", "other"] if first == "important" else ["other", "important"]
    with made(folder, num_gpu_blocks_override=17, schedule_policy="priority") as llm:
        answers = {}
        for name in order:
            answers[name] = begin(llm, prompts[name], 150, 0 if name == "important" else 10)
            step(llm)
            step(llm)
        while not all(answer.finished for answer in answers.values()):
            step(llm)
        preemptions = {name: answer.requests[0].num_preemptions for name, answer in answers.items()}
        assert preemptions["important"] == 0 < preemptions["other"]


def test_a_prompt_counts_once_however_long_it_waits(folder: str) -> None:
    prompts = [[*range(3, 100), 200 + i] for i in range(6)]
    with made(folder, num_gpu_blocks_override=16) as llm:
        llm.generate(prompts, greedy(100), use_tqdm=False)
        stats = llm.engine.scheduler.kv.stats
        assert llm.engine.scheduler.num_preemptions > 0
        assert stats.query_tokens == sum(map(len, prompts))
        assert 0 < stats.hit_tokens < stats.query_tokens


def test_two_iterators_at_once_each_give_all(folder: str) -> None:
    with made(folder) as llm:
        one, two = llm.stream([5, 6, 7], greedy(10)), llm.stream([8, 9, 10], greedy(5))
        next(one)
        next(two)
        assert [len(output.outputs[0].token_ids) for output in one][-1] == 10
        rest = list(two)
        assert len(rest[-1].outputs[0].token_ids) == 5
        assert rest[-1].finished


def test_an_answer_does_not_wait_for_a_disk_that_hangs(folder: str, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    write = Segment.write
    monkeypatch.setattr(Segment, "write", lambda *asked: (go_on.wait(60), write(*asked))[1])
    llm = made(folder, max_model_len=512, max_num_batched_tokens=512, disk=(f"{tmp_path / 'kv'}:20MB",), spill="eager")
    try:
        started = time.monotonic()
        output = llm.generate([drawn(0, 400)], greedy(2), use_tqdm=False)[0]
        assert len(output.outputs[0].token_ids) == 2
        assert time.monotonic() - started < 30
        connector = llm.engine.scheduler.connector
        assert isinstance(connector, TieredConnector)
        connector.store.poll()
        assert connector.busy
    finally:
        go_on.set()
        llm.close()


def test_nothing_is_found_after_a_reset_though_it_is_being_written(folder: str, tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    write = Segment.write
    monkeypatch.setattr(Segment, "write", lambda *asked: (go_on.wait(60), write(*asked))[1])
    prompt = drawn(0, 400)
    with made(folder, max_model_len=512, max_num_batched_tokens=512, host_memory=str(128 * BLOCK_BYTES),
              disk=(f"{tmp_path / 'kv'}:20MB",), spill="eager", restore="always") as llm:
        try:
            connector = llm.engine.scheduler.connector
            assert isinstance(connector, TieredConnector)
            llm.generate([prompt], greedy(2), use_tqdm=False)
            connector.poll()
            assert len(connector.store._writes) > 0
            llm.reset_prefix_cache()
            again = llm.generate([prompt], greedy(2), use_tqdm=False)[0]
            assert (again.sources.computed, again.sources.host) == (400, 0)
            llm.engine.scheduler.check()
        finally:
            go_on.set()


def test_a_failed_step_leaves_nothing_open(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"disk": (f"{tmp_path / 'kv'}:20MB",), "host_memory": str(64 * BLOCK_BYTES)}
    llm = made(folder, **flags)
    llm.generate([drawn(0, 100)], greedy(2), use_tqdm=False)

    def broken(_work: object) -> None:
        raise RuntimeError("an illegal access")

    monkeypatch.setattr(llm.engine.runner, "_execute", broken)
    with pytest.raises(SpilloverError, match=r"failed in a step.*RuntimeError: an illegal access"):
        llm.generate([[5, 6]], greedy(3), use_tqdm=False)
    llm.close()
    with made(folder, **flags) as again:  # the folder is unlocked, and has the blocks computed before
        assert again.generate([drawn(0, 100)], greedy(2), use_tqdm=False)[0].sources.disk > 0


@pytest.mark.parametrize("fails", [False, True], ids=["computes", "fails"])
def test_a_result_does_not_wait_for_the_step_behind_it(folder: str, monkeypatch: pytest.MonkeyPatch,
                                                       fails: bool) -> None:
    with made(folder) as llm:
        expected = llm.generate(drawn(0, 20), greedy(2), use_tqdm=False)[0].outputs[0].token_ids
        runner, begun = llm.engine.runner, 0
        assert isinstance(runner, CpuRunner)
        forward, both_launched, first_read = runner.model.forward_stacked, threading.Event(), threading.Event()

        def slow(*arguments: Any) -> Any:
            nonlocal begun
            begun += 1
            if begun == 1:
                assert both_launched.wait(10)
            else:
                assert not first._outcome.done()  # otherwise the host would take the interpreter from this step
            if begun == 2 and fails:
                raise RuntimeError("an illegal access")
            hidden = forward(*arguments)
            assert begun == 1 or first_read.wait(10)
            return hidden

        monkeypatch.setattr(runner.model, "forward_stacked", slow)
        begin(llm, drawn(0, 20), 2)
        first, second = (runner.launch(llm.engine.scheduler.schedule()) for _ in range(2))
        both_launched.set()
        first._outcome.result(10)  # with a timeout, rather than wait forever
        assert first.result().token_ids == [(expected[0],)]
        first_read.set()
        if fails:
            with pytest.raises(RuntimeError, match="illegal access"):
                second.result()
        else:
            assert second.result().token_ids == [(expected[1],)]


def test_a_seed_gives_the_same_tokens_whatever_the_others_ask_for(folder: str) -> None:
    seeded = SamplingParams(temperature=0.9, seed=11, max_tokens=12, ignore_eos=True)
    beside = [greedy(12), SamplingParams(temperature=1.3, seed=5, max_tokens=9, ignore_eos=True),
              SamplingParams(temperature=0.7, top_k=40, seed=6, max_tokens=9, ignore_eos=True), greedy(9, logprobs=1)]
    prompts = [drawn(seed, 20) for seed in range(4)]
    with made(folder) as llm:
        alone = llm.generate(prompts[0], seeded, use_tqdm=False)[0].outputs[0].token_ids
        assert alone != llm.generate(prompts[0], greedy(12), use_tqdm=False)[0].outputs[0].token_ids
        for others in ([beside[0]], beside[:2], beside[1:], [beside[3]]):  # all sampled by temperature alone, or not
            together = llm.generate(prompts[:1 + len(others)], [seeded, *others], use_tqdm=False)
            assert together[0].outputs[0].token_ids == alone


@pytest.mark.parametrize("prompt", [np.array([5, 6, 7]), [np.int64(5), np.int64(6), np.int64(7)], (5, 6, 7)],
                         ids=["array", "numpy", "tuple"])
def test_token_ids_may_be_any_integers(folder: str, prompt: Any) -> None:
    with made(folder) as llm:
        found = llm.generate({"prompt_token_ids": prompt}, greedy(np.int64(3)), use_tqdm=False)[0]
        assert found.prompt_token_ids == [5, 6, 7]
        plain = llm.generate([[5, 6, 7]], greedy(3), use_tqdm=False)[0]
        assert found.outputs[0].token_ids == plain.outputs[0].token_ids
        with pytest.raises(RequestError, match="whole numbers"):
            llm.generate({"prompt_token_ids": [5, 6.5]}, greedy(3), use_tqdm=False)


@pytest.mark.parametrize("name", ["n", "top_k", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "seed"])
def test_half_a_token_cannot_be_asked_for(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} must be a whole number, got 2.5"):
        SamplingParams(**{"max_tokens": 5, name: 2.5})


def test_who_waits_for_room_is_not_put_off_by_those_who_decode(folder: str, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    write = Segment.write
    slow = threading.Event()
    monkeypatch.setattr(Segment, "write", lambda *asked: (slow.is_set() and time.sleep(1), write(*asked))[1])
    with made(folder, num_gpu_blocks_override=420, max_model_len=1600, block_size=8, host_memory=str(60 * 4096),
              disk=(f"{tmp_path / 'kv'}:20MB",), max_num_batched_tokens=256, max_num_seqs=8) as llm:
        slow.set()
        for seed in range(8):  # fills the pool with prefixes, and host memory with blocks not yet on the disk
            answer = begin(llm, drawn(seed, 400), 2)
            while not answer.finished:
                step(llm)
        others = [begin(llm, drawn(seed, 20 + seed), 1200) for seed in range(10, 16)]
        while not all(answer.num_output for answer in others):
            step(llm)
        waiting = begin(llm, drawn(20, 800), 2).requests[0]
        deadline = time.monotonic() + 15
        while not waiting.first_token and time.monotonic() < deadline:
            step(llm)
            time.sleep(0.01)
        assert waiting.first_token
        assert not any(answer.finished for answer in others)
        slow.clear()
        for request in (waiting, *(answer.requests[0] for answer in others)):
            llm.engine.scheduler.stop(request, "abort")
