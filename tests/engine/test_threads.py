"""One `LLM` used from many threads: the same tokens as one by one, and no remains when callers leave or fail."""

from __future__ import annotations

import gc
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from threads import check_nothing_is_left, close_in_the_middle, drive_threads, make_cases, tokens

from spillover import LLM, SamplingParams
from spillover.errors import SpilloverError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "max_position_embeddings": 256, "tie_word_embeddings": False, "hidden_act": "silu",
    "eos_token_id": 2, "torch_dtype": "float32",
}
PROMPT, LONG = [5, 6, 7], SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(LLAMA))
    return str(path)


@pytest.fixture
def llm(folder: str) -> Iterator[LLM]:
    """Yield an LLM with so few blocks that requests are preempted."""
    with LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=16, max_num_batched_tokens=64,
             num_gpu_blocks_override=24, block_size=8, max_model_len=160) as made:
        yield made


def waits_until(holds: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.005)


def test_64_threads_with_random_aborts_get_the_tokens_of_one_by_one(llm: LLM) -> None:
    done = drive_threads(llm, make_cases(llm, 0, LLAMA["vocab_size"]), threads=64, requests=2000)
    assert done.total() >= 2000
    assert min(done[how] for how in ("whole", "streamed", "left", "failed")) > 50
    assert llm.stats().preemptions > 0
    check_nothing_is_left(llm)
    assert not llm._thread._open


def test_siblings_that_end_in_one_step_are_one_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, long = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, n=2), LONG
    expected = [tokens(llm.generate([PROMPT], params, use_tqdm=False)[0]) for params in (pair, long)]
    step, begun, held = llm.engine.step, llm.engine.num_steps, []

    def hold_back() -> list[Any]:
        """Report the first 20 steps at once; both siblings finish within them."""
        held.extend(step())
        if llm.engine.num_steps < begun + 20:
            return []
        changed = list(dict.fromkeys(held))
        held.clear()
        return changed

    monkeypatch.setattr(llm.engine, "step", hold_back)
    first, second = llm.generate([PROMPT, PROMPT], [pair, long], use_tqdm=False)
    assert [tokens(first), tokens(second)] == expected


def test_close_ends_who_waits_and_refuses_who_comes_later(llm: LLM) -> None:
    assert close_in_the_middle(llm, 64) == 64
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
    check_nothing_is_left(llm)


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
    from spillover.engine.output.output_processor import Answer

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
    check_nothing_is_left(llm)


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
