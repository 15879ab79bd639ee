"""One `LLM` used from many threads: the same tokens as one by one, and nothing left when callers leave or fail."""

from __future__ import annotations

import gc
import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import pytest

from spillover import LLM, RequestOutput, SamplingParams
from spillover.errors import SpilloverError

THREADS, REQUESTS, KINDS = 64, 2000, 60
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "max_position_embeddings": 256, "tie_word_embeddings": False, "hidden_act": "silu",
    "eos_token_id": 2, "torch_dtype": "float32",
}
PROMPT, LONG = [5, 6, 7], SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)


class LeftInAHurryError(Exception):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(LLAMA))
    return str(path)


@pytest.fixture
def llm(folder: str) -> Iterator[LLM]:
    """So few blocks that requests are preempted."""
    with LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=16, max_num_batched_tokens=64,
             num_gpu_blocks_override=40, block_size=8, max_model_len=256) as made:
        yield made


def tokens(output: RequestOutput) -> list[list[int]]:
    return [each.token_ids for each in output.outputs]


def drawn_requests(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that share beginnings; greedy and sampled, alone and with siblings."""
    start = [rng.randrange(3, 256) for _ in range(24)]
    found = []
    for _ in range(KINDS):
        prompt = start[:rng.choice([0, 8, 17, 24])] + [rng.randrange(3, 256) for _ in range(rng.randint(1, 12))]
        found.append((prompt, SamplingParams(
            temperature=rng.choice([0.0, 0.8]), seed=rng.randrange(1000), n=rng.choice([1, 1, 1, 2]),
            max_tokens=rng.randint(1, 16), ignore_eos=rng.random() < 0.5, repetition_penalty=rng.choice([1.0, 1.1]))))
    return found


def waits_until(holds: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.005)


def nothing_is_left(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.cache.protected, stats.cache.in_flight) == (0, 0, 0, 0)
    llm.engine.scheduler.check()
    assert not llm._thread._open


def test_64_threads_with_random_aborts_get_the_tokens_of_one_by_one(llm: LLM) -> None:
    requests = drawn_requests(random.Random(0))
    expected = [tokens(llm.generate([prompt], params, use_tqdm=False)[0]) for prompt, params in requests]
    llm.reset_prefix_cache()

    def whole(rng: random.Random) -> int:
        some = rng.sample(range(KINDS), rng.randint(1, 3))
        outputs = llm.generate([requests[kind][0] for kind in some], [requests[kind][1] for kind in some],
                               use_tqdm=False)
        assert [tokens(output) for output in outputs] == [expected[kind] for kind in some]
        return len(some)

    def streamed(rng: random.Random) -> int:
        kind = rng.randrange(KINDS)
        last: list[list[int]] = [[] for _ in expected[kind]]
        for output in llm.stream(*requests[kind]):
            assert all(new[:len(old)] == old for old, new in zip(last, tokens(output), strict=True))
            last = tokens(output)
        assert last == expected[kind]
        return 1

    def left(rng: random.Random) -> int:
        kind = rng.randrange(KINDS)
        with closing(llm.stream(*requests[kind])) as stream:  # type: ignore[type-var]
            for output, _ in zip(stream, range(rng.randint(0, 3)), strict=False):
                assert all(new == old[:len(new)] for old, new in zip(expected[kind], tokens(output), strict=True))
        return 1

    def failed(rng: random.Random) -> int:
        with suppress(LeftInAHurryError):
            for _ in llm.stream(*requests[rng.randrange(KINDS)]):
                raise LeftInAHurryError
        return 1

    def looked(rng: random.Random) -> int:
        stats = llm.stats()
        cache = stats.cache
        assert cache.free + cache.evictable + cache.protected + cache.in_flight == cache.total
        if rng.random() < 0.1:
            llm.reset_prefix_cache()
        return 0

    def work(seed: int) -> int:
        rng, done = random.Random(seed), 0
        while done < REQUESTS // THREADS + 1:
            done += rng.choices([whole, streamed, left, failed, looked], [4, 4, 3, 1, 1])[0](rng)
        return done

    with ThreadPoolExecutor(THREADS) as pool:
        assert sum(pool.map(work, range(THREADS))) >= REQUESTS
    assert llm.stats().preemptions > 0
    nothing_is_left(llm)


def test_close_ends_who_waits_and_refuses_who_comes_later(llm: LLM) -> None:
    def whole() -> None:
        while True:
            llm.generate([PROMPT, PROMPT], LONG, use_tqdm=False)

    def streamed() -> None:
        while True:
            list(llm.stream(PROMPT, LONG))

    with ThreadPoolExecutor(THREADS + 3) as pool:
        calls = [pool.submit(whole if index % 2 else streamed) for index in range(THREADS)]
        waits_until(lambda: llm.stats().num_waiting > 0)
        closers = [pool.submit(llm.close) for _ in range(3)]
        for call in calls:
            with pytest.raises(SpilloverError, match="the LLM was closed"):
                call.result(30)
        for closer in closers:
            closer.result(30)
    late: list[Callable[[], Any]] = [lambda: llm.generate([PROMPT]), lambda: next(llm.stream(PROMPT)), llm.stats,
                                     llm.reset_prefix_cache]
    for use in late:
        with pytest.raises(SpilloverError, match="the LLM was closed; make a new one"):
            use()
    llm.close()


def test_an_interrupt_ends_the_requests_of_its_own_thread_alone(llm: LLM) -> None:
    expected = tokens(llm.generate([PROMPT], LONG, use_tqdm=False)[0])
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        waits_until(lambda: llm.stats().num_running == 3)
        signal.pthread_kill(main, signal.SIGINT)

    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            other = pool.submit(llm.generate, [PROMPT], LONG, False)
            interrupting = pool.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([[8, 9], [10, 11]] * 50, LONG, use_tqdm=False)
            interrupting.result(30)
            assert tokens(other.result(30)[0]) == expected
    nothing_is_left(llm)


def test_a_failed_step_is_told_to_everyone_in_a_sentence(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    launch = llm.engine.runner.launch

    def fail(batch: Any) -> Any:
        if not go_on.is_set():
            return launch(batch)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(llm.engine.runner, "launch", fail)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(llm.generate, [PROMPT], LONG, False) for _ in range(8)]
        waits_until(lambda: llm.stats().num_running == 8 or any(call.done() for call in calls))
        go_on.set()
        for call in calls:
            with pytest.raises(SpilloverError, match=r"^the engine failed in a step.*the device is gone.*new LLM$"):
                call.result(30)
    with pytest.raises(SpilloverError, match="failed in an earlier step"):
        llm.generate([PROMPT])


def test_a_text_that_cannot_be_made_fails_its_own_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from spillover.engine.output_processor import Answer

    advance = Answer.advance

    def fail(answer: Answer, request: Any) -> str | None:
        if request.prompt_token_ids == [9]:
            raise ValueError("no such letter")
        return advance(answer, request)

    monkeypatch.setattr(Answer, "advance", fail)
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(llm.generate, [PROMPT], LONG, False)
        with pytest.raises(SpilloverError, match=r"the text of this request could not be made.*no such letter"):
            llm.generate([[9], [8]], LONG, use_tqdm=False)
        assert len(other.result(30)[0].outputs[0].token_ids) == 120
    nothing_is_left(llm)


def test_a_forgotten_iterator_and_a_forgotten_llm_leave_nothing(folder: str) -> None:
    def used() -> threading.Thread:
        llm = LLM(folder, load_format="null", skip_tokenizer_init=True)
        stream = llm.stream(PROMPT, LONG)
        next(stream)
        del stream
        gc.collect()
        waits_until(lambda: llm.stats().num_running == 0)
        return llm._thread._thread

    thread = used()
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
