"""The engine in a separate process: the same tokens as in process, and no loss or remains when something dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import uvloop

from spillover import LLM, SamplingParams, StructuredOutputs
from spillover.engine.output.output_processor import Answer
from spillover.errors import EngineDead, QueueFull, RequestError, SpilloverError
from spillover.server.engine import engine_keeper
from spillover.server.engine.async_llm import AsyncLLM
from support.models.hf_reference import VOCAB, save_checkpoint, tiny_model

Result = TypeVar("Result")

LIMITS: dict[str, Any] = {"skip_tokenizer_init": True, "block_size": 8, "max_model_len": 192,
                          "num_gpu_blocks_override": 200, "max_num_seqs": 4}


class Served:
    """A client on an event loop in a separate thread, as a server would run it."""

    def __init__(self, model: str | None = None, **flags: Any) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.client = AsyncLLM(model, max_queue=64, **flags)
        try:
            self.run(self.client.start())
        except BaseException:
            self.close()
            raise

    def run(self, work: Coroutine[Any, Any, Result], timeout: float = 60) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def generate(self, prompt: str | list[int], params: SamplingParams) -> Answer:
        return self.run(answer(self.client, prompt, params))

    def close(self) -> None:
        self.run(self.client.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def answer(client: AsyncLLM, prompt: str | list[int], params: SamplingParams) -> Answer:
    text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
    looks = [look async for look in client.answers(client.factory.make(text, ids, params), text)]
    assert looks[-1].finished
    return looks[-1]


async def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    model, _ = tiny_model("llama", seed=3)
    return str(save_checkpoint(model, tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def tiny(folder: str) -> Iterator[Served]:
    served = Served(folder, **LIMITS)
    yield served
    served.close()


@pytest.fixture(scope="module")
def null() -> Iterator[Served]:
    """Yield a client with the null model, but the default model's tokenizer."""
    served = Served(load_format="null", max_model_len=2048)
    yield served
    served.close()


def test_tokens_and_logprobs_are_those_of_the_engine_in_process(tiny: Served, folder: str) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))] for _ in range(8)]
    params = [
        SamplingParams(temperature=0, max_tokens=20),
        SamplingParams(temperature=0.9, top_p=0.8, seed=2**70, max_tokens=30, n=3),
        SamplingParams(temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0.7, seed=-5, repetition_penalty=1.2, min_p=0.01, logit_bias={7: 3.0}, max_tokens=9),
    ] * 2

    async def ask_all() -> list[Answer]:
        return await asyncio.gather(*(answer(tiny.client, p, each) for p, each in zip(prompts, params, strict=True)))

    answers = [each.output() for each in tiny.run(ask_all())]
    with LLM(folder, **LIMITS) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    for ours, theirs in zip(answers, expected, strict=True):
        assert [each.token_ids for each in ours.outputs] == [each.token_ids for each in theirs.outputs]
        assert [each.logprobs for each in ours.outputs] == [each.logprobs for each in theirs.outputs]
        assert ours.prompt_logprobs == theirs.prompt_logprobs
        assert [each.finish_reason for each in ours.outputs] == [each.finish_reason for each in theirs.outputs]
        assert ours.sources.total == len(ours.prompt_token_ids)
        assert ours.timings is not None
        assert min(ours.timings.queue, ours.timings.prefill, ours.timings.decode) >= 0


def test_a_client_that_leaves_frees_its_blocks_within_one_step(tiny: Served) -> None:
    async def leave() -> int:
        client = tiny.client
        requests = client.factory.make(None, list(range(40)), SamplingParams(temperature=0, max_tokens=150, n=2))
        async with contextlib.aclosing(client.answers(requests)) as answers:
            async for _ in answers:
                break
        assert client.num_open == 0
        before = await client.call("stats")
        while (after := await client.call("stats")).blocks_protected:
            pass
        assert after.num_running == 0
        return after.steps - before.steps

    assert tiny.run(leave()) <= 1


def test_cancelling_the_reader_ends_the_request(tiny: Served) -> None:
    async def cancel() -> None:
        task = asyncio.ensure_future(answer(tiny.client, [1, 2, 3], SamplingParams(max_tokens=180)))
        await until(lambda: tiny.client.num_open == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert tiny.client.num_open == 0
        while (await tiny.client.call("stats")).blocks_protected:
            pass

    tiny.run(cancel())


def test_sleep_keeps_the_kv_cache_and_requests_wait_for_the_wake_up(tiny: Served) -> None:
    prompt, params = list(range(100, 150)), SamplingParams(temperature=0, max_tokens=24)

    async def through_sleep() -> None:
        client = tiny.client
        expected = (await answer(client, prompt, params)).output()
        running = client.factory.make(None, prompt, params)
        stream = client.answers(running)
        await anext(stream)  # it falls asleep in the middle of this answer
        assert (await client.call("sleep")).sleeping
        assert client.is_sleeping
        assert client.engine_state == "sleeping"
        assert client.ready
        waiting = asyncio.ensure_future(answer(client, prompt, params))
        dropped = asyncio.ensure_future(answer(client, prompt, params))
        await asyncio.sleep(0.1)
        dropped.cancel()
        steps = (await client.call("stats")).steps
        await asyncio.sleep(0.1)
        asleep = await client.call("stats")
        assert asleep.steps == steps
        assert asleep.num_waiting == 1
        assert not waiting.done()
        await client.call("wake_up")
        assert client.engine_state == "ready"
        rest = [look async for look in stream]
        assert rest[-1].output().outputs[0].token_ids == expected.outputs[0].token_ids
        after = (await waiting).output()
        assert after.outputs[0].token_ids == expected.outputs[0].token_ids
        assert after.sources.device == 48
        await client.call("reset_prefix_cache")
        assert (await answer(client, prompt, params)).output().sources.device == 0

    tiny.run(through_sleep())


def test_the_queue_is_bounded(tiny: Served) -> None:
    async def fill() -> None:
        client, params = tiny.client, SamplingParams(max_tokens=100, seed=1)
        client.max_queue = 2
        tasks = [asyncio.ensure_future(answer(client, [index, 2], params)) for index in range(6)]  # 4 run, 2 wait
        await until(lambda: client.num_open == 6)
        with pytest.raises(QueueFull) as full:
            await answer(client, [1], params)
        assert full.value.retry_after >= 1
        await asyncio.gather(*tasks)
        await answer(client, [1], params)

    try:
        tiny.run(fill())
    finally:
        tiny.client.max_queue = 64


def test_an_idle_engine_takes_no_cpu_time(tiny: Served) -> None:
    process = psutil.Process(tiny.client.info.pid)
    before = process.cpu_times()
    time.sleep(1)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.05


def test_a_value_that_does_not_fit_the_wire_is_refused_and_the_engine_untouched(tiny: Served) -> None:
    restarts = tiny.client.info.restarts
    with pytest.raises(RequestError, match="wrong type or is out of range"):
        tiny.generate([1], SamplingParams(detokenize="yes"))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="wrong type or is out of range"):
        tiny.generate([1], SamplingParams(min_tokens=0, max_tokens=2**80))
    assert tiny.generate([1], SamplingParams(max_tokens=3)).num_output == 3
    assert tiny.client.info.restarts == restarts


def test_the_null_model_streams_words_and_stop_strings_end_them(null: Served) -> None:
    assert null.client.info.null_model
    assert "null model" in null.client.info.plan.device_name
    output = null.generate("Hello", SamplingParams(max_tokens=40)).output()
    text = output.outputs[0].text
    assert len(output.outputs[0].token_ids) == 40
    assert len(text) > 40
    stop = text[20:26]
    shorter = null.generate("Hello", SamplingParams(max_tokens=40, stop=(stop,))).output().outputs[0]
    assert shorter.text == text[:text.index(stop)]
    assert (shorter.finish_reason, shorter.stop_reason) == ("stop", stop)


def test_a_grammar_is_compiled_beside_the_loop_and_a_bad_one_refused(null: Served) -> None:
    bad = SamplingParams(max_tokens=5, n=2, structured_outputs=StructuredOutputs(regex="(unclosed"))
    with pytest.raises(RequestError, match="does not compile"):
        null.generate("Hello", bad)
    good = SamplingParams(max_tokens=5, n=2, structured_outputs=StructuredOutputs(choice=("yes", "no")))
    assert null.generate("Hello", good).num_output == 10  # the null model ignores grammars

    async def leave_while_compiling() -> None:
        client = null.client
        schema = {"type": "object", "properties": {f"key{i}": {"type": "string"} for i in range(300)}}
        params = SamplingParams(max_tokens=5, n=2, structured_outputs=StructuredOutputs(json=schema))
        task = asyncio.ensure_future(answer(client, "Hello", params))
        await until(lambda: client.num_open == 2)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: client.latest_stats().num_waiting == 0)
        assert (await client.call("stats")).num_running == 0

    null.run(leave_while_compiling())


def test_a_slow_reader_sees_the_newest_state_and_holds_up_nobody(null: Served) -> None:
    async def read_slowly() -> int:
        client = null.client
        lengths = []
        async for look in client.answers(client.factory.make("Hello", None, SamplingParams(max_tokens=1000))):
            lengths.append(look.num_output)
            start = time.monotonic()
            while time.monotonic() - start < 0.2 or client.num_open:
                await answer(client, "Others", SamplingParams(max_tokens=10))
        assert lengths[-1] == 1000
        return len(lengths)

    assert null.run(read_slowly()) <= 3


def test_a_dead_engine_is_told_to_clients_at_once_and_started_again(
        folder: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(folder, load_format="null", **LIMITS)
    client, params = served.client, SamplingParams(max_tokens=150)

    async def die(how: Callable[[], None], cause: str) -> None:
        await client.call("sleep")  # so that all are still open
        tasks = [asyncio.ensure_future(answer(client, [1, 2, 3], params)) for _ in range(8)]
        await until(lambda: client.num_open == 8)
        start = time.monotonic()
        how()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - start < 2
        assert all(isinstance(result, EngineDead) and cause in str(result) for result in results)
        assert not client.ready
        with pytest.raises(EngineDead):
            await answer(client, [1, 2, 3], params)

    async def die_and_serve_again() -> None:
        expected = (await answer(client, [1, 2, 3], params)).output().outputs[0].token_ids
        first = client.info.pid
        await die(lambda: os.kill(first, signal.SIGKILL), "killed by SIGKILL")
        await until(lambda: client.ready)
        assert client.info.pid != first
        assert client.info.restarts == 1
        assert (await answer(client, [1, 2, 3], params)).output().outputs[0].token_ids == expected
        # An engine that fails by itself leaves its traceback in the log; one death more than allowed ends the restarts.
        monkeypatch.setattr(engine_keeper, "MAX_QUICK_DEATHS", 1)
        await die(lambda: client._keeper.send(b"\xc1"), "exited with code 1")
        await until(lambda: client.gave_up)
        with pytest.raises(EngineDead, match="not restarted"):
            await answer(client, [1, 2, 3], params)

    try:
        served.run(die_and_serve_again())
    finally:
        served.close()
    assert "msgspec.DecodeError" in caplog.text
    assert "giving up" in caplog.text


def test_stop_lets_requests_end_and_leaves_nothing(folder: str, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    served = Served(folder, load_format="null", **LIMITS)
    client = served.client
    assert list(tmp_path.iterdir()) == []  # the socket was unlinked

    async def drain() -> None:
        task = asyncio.ensure_future(answer(client, [1, 2, 3], SamplingParams(max_tokens=150)))
        await asyncio.sleep(0)  # the task's first step submits the request
        assert client.num_open == 1
        stopping = asyncio.ensure_future(client.close(10))
        await asyncio.sleep(0)
        with pytest.raises(EngineDead):
            await answer(client, [1], SamplingParams())
        assert (await task).num_output == 150
        await asyncio.gather(stopping, client.close(10), client.close())

    served.run(drain())
    assert not psutil.pid_exists(client.info.pid)
    assert not client.ready
    assert client.engine_state == "dead"
    assert list(tmp_path.iterdir()) == []
    served.close()


def test_an_engine_that_cannot_start_says_why_in_its_own_sentence(folder: str, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = psutil.Process().children()
    with pytest.raises(SpilloverError, match="--max-model-len is 100,000; lower it to at most 256"):
        Served(folder, skip_tokenizer_init=True, max_model_len=100_000)
    assert list(tmp_path.iterdir()) == []
    assert psutil.Process().children() == before


FRONT = """
import asyncio, sys
from spillover import AsyncLLM

async def main():
    client = await AsyncLLM(sys.argv[1], load_format="null", skip_tokenizer_init=True).start()
    print(client.info.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_the_engine_ends_with_a_front_that_is_killed(folder: str) -> None:
    with subprocess.Popen([sys.executable, "-c", FRONT, folder], stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        engine = psutil.Process(int(front.stdout.readline()))
        assert engine.is_running()
        front.kill()
        front.wait()
        deadline = time.monotonic() + 2
        while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the engine outlived its front"
            time.sleep(0.01)
