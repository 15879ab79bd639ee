"""Ranks in separate processes give the same tokens, and end in time without remains, whichever is killed and when."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import threading
import time
from typing import Any
from unittest import mock

import msgspec
import psutil
import pytest

from spillover import LLM, SamplingParams
from spillover.engine.parallel.parallel_runner import ParallelRunner
from spillover.engine.parallel.rank_processes import RankProcesses
from spillover.engine.step import Step
from spillover.errors import SpilloverError
from support.models.hf_reference import VOCAB, greedy, save_checkpoint, tiny_model

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "block_size": 8, "max_model_len": 256,
                           "num_gpu_blocks_override": 200}
SECONDS = 5.0  # within which the loss of a rank must be reported
GONE_SECONDS = 10.0  # within which killed processes must have disappeared
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(tiny_model("mixtral", seed=3)[0], tmp_path_factory.mktemp("mixtral")))


def others_of(llm: LLM) -> RankProcesses:
    runner = llm.engine.runner
    assert isinstance(runner, ParallelRunner)
    others = runner._others
    assert isinstance(others, RankProcesses)
    return others


def generate_for_ever(llm: LLM) -> None:
    while True:
        llm.generate([[5, 6, 7], [8, 9]], LONG, use_tqdm=False)


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + GONE_SECONDS
    while left := [pid for pid in pids if psutil.pid_exists(pid)
                   and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.alone  # the loss of a rank must be reported within seconds
@pytest.mark.parametrize(("fault", "words"), [
    (signal.SIGKILL, r"rank 1 \(process \d+\) was killed by SIGKILL"), (signal.SIGSTOP, "rank 1 is stopped"),
    (None, r"rank 1 failed \(msgspec.ValidationError")])
def test_tokens_are_those_of_hugging_face_and_a_lost_rank_is_told_in_time(folder: str, fault: signal.Signals | None,
                                                                          words: str) -> None:
    """Ranks give Hugging Face's tokens; one that dies, hangs or fails is reported in time, and no process remains."""
    model, _ = tiny_model("mixtral", seed=3)
    rng = random.Random(str(fault))
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 17, 40)]
    killed = fault == signal.SIGKILL
    with LLM(folder, tensor_parallel_size=2, enable_expert_parallel=killed, max_num_batched_tokens=16,
             **OPTIONS) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [greedy(model, prompt, 16) for prompt in prompts]
        held, stored = llm.engine.runner.weight_bytes, sum(parameter.nbytes for parameter in model.parameters())
        assert stored <= held < 1.2 * stored  # norms and routers are stored twice, and panels are padded
        ranks, layers = llm.stats().ranks, model.config.num_hidden_layers
        assert ranks.size == 2
        assert ranks.calls > 16 * (1 + 2 * layers)
        assert min(ranks.bytes, ranks.seconds) > 0
        assert sum(ranks.expert_rows) == (layers * 2 * (1 + 17 + 40 + 3 * 15) if killed else 0)
        pids = others_of(llm).pids
        assert len(pids) == 1
        sent: list[float] = []
        send = others_of(llm).send

        def strike() -> None:
            sent.append(time.monotonic())
            if fault is None:
                send(msgspec.msgpack.encode("no step"))
            else:
                psutil.Process(pids[0]).send_signal(fault)

        timer = threading.Timer(rng.uniform(0.05, 0.4), strike)
        timer.start()
        with pytest.raises(SpilloverError, match=words):
            generate_for_ever(llm)
        assert time.monotonic() - sent[0] < SECONDS
        with pytest.raises(SpilloverError, match="make a new LLM"):
            llm.generate([[5, 6, 7]], LONG, use_tqdm=False)
    assert_gone(pids)


def test_a_rank_that_dies_while_it_starts_is_a_sentence(folder: str) -> None:
    killed: list[int] = []

    def strike() -> None:
        deadline = time.monotonic() + GONE_SECONDS
        while not killed and time.monotonic() < deadline:
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):
                    if any("rank_process" in word for word in child.cmdline()):
                        killed.append(child.pid)
                        child.kill()
            time.sleep(0.01)

    thread = threading.Thread(target=strike)
    thread.start()
    with pytest.raises(SpilloverError, match=r"rank 1 \(process \d+\) was killed by SIGKILL") as refused:
        LLM(folder, tensor_parallel_size=2, **OPTIONS)
    thread.join()
    assert "\n" not in str(refused.value)
    assert_gone(killed)


PARENT = """
import sys, time
from spillover import LLM, SamplingParams
with LLM(sys.argv[1], tensor_parallel_size=2, skip_tokenizer_init=True, block_size=8, max_model_len=256,
         num_gpu_blocks_override=200, host_memory="4MB") as llm:
    print(*llm.engine.runner._others.pids, flush=True)
    while True:
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), use_tqdm=False)
"""


def test_ranks_end_with_rank_0(folder: str) -> None:
    """When rank 0 ends, so do the others, even a stopped one; their shared memory has no name that could remain."""
    with subprocess.Popen([sys.executable, "-c", PARENT, folder], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        for pid in (parent.pid, *pids):
            shared = [mapped.path for mapped in psutil.Process(pid).memory_maps() if "spillover-kv" in mapped.path]
            assert shared
            assert all(path.startswith("/memfd:") for path in shared)
        psutil.Process(pids[0]).suspend()
        parent.kill()
    assert_gone(pids)


@pytest.mark.parametrize(("flags", "sentence"), [
    ({"tensor_parallel_size": 3}, "3 does not divide the model's 4 attention heads; it can be 1, 2, 4"),
    ({"tensor_parallel_size": 4, "enable_expert_parallel": True}, "does not divide the model's 6 experts"),
    ({"tensor_parallel_size": 2, "load_format": "null"}, "has no model to split"),
    ({"tensor_parallel_size": 2, "speculative_method": "substitute"}, "substitute works with one rank only"),
])
def test_what_cannot_be_is_said_before_anything_is_loaded(folder: str, flags: dict[str, Any],
                                                          sentence: str) -> None:
    with pytest.raises(SpilloverError, match=sentence) as refused:
        LLM(folder, **OPTIONS, **flags)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("fails", [False, True])
def test_a_launch_that_waits_counts_as_waiting(fails: bool) -> None:
    """Capturing a CUDA graph counts as waiting: it waits for earlier steps, and so perhaps for a stopped rank."""
    seen: list[float | None] = []

    def launch(step: object) -> mock.Mock:
        seen.append(runner.waiting_since)
        if fails:
            raise RuntimeError("out of memory")
        return mock.Mock()

    runner = ParallelRunner(mock.Mock(launch=launch), mock.Mock())
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        runner.launch(Step(()))
    assert seen[0] is not None
    assert runner.waiting_since is None
