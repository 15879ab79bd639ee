"""A hanging engine: /health reports it within seconds; one that recovers continues, one that does not is replaced."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from spillover import AsyncLLM
from spillover.errors import SpilloverError
from spillover.server.engine import heartbeat
from spillover.server.engine.heartbeat import CALL, IDLE, IMPORTING, LOADING, STEP, HangLimits, Heartbeat, Pulse
from support.models.hf_reference import save_checkpoint, tiny_model
from support.servers.running_server import Server, running, until

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def watched() -> Iterator[Server]:
    """Yield a server with limits long enough to hang for a test, and short enough to be replaced in one."""
    with running("--load-format", "null", "--max-model-len", "1024", "--engine-degraded-seconds", "4",
                 "--engine-hang-seconds", "12") as started:
        yield started


def engine_of(server: Server) -> psutil.Process:
    return psutil.Process(server.process.pid).children()[0]


def test_a_stopped_engine_shows_in_health_and_goes_on_with_its_answers(watched: Server) -> None:
    engine, answers = engine_of(watched), []

    def ask() -> None:
        with watched.http() as http:
            answers.append(http.post(COMPLETIONS, json={"prompt": "Once", "max_tokens": 900, "ignore_eos": True}))

    with watched.http() as http:
        assert http.get("/health").status_code == 200
        asking = [threading.Thread(target=ask) for _ in range(4)]
        engine.suspend()
        try:
            for thread in asking:
                thread.start()
            until(lambda: http.get("/health").status_code == 503, 20)
            error = http.get("/health").json()["error"]
            assert "no heartbeat for" in error["message"]
            assert "(since 20" in error["message"]
            assert "after 12 s it is restarted" in error["message"]
            assert http.post(COMPLETIONS, json={"prompt": "a"}).status_code == 503
            assert http.get("/live").json()["state"] == "hung"
            assert watched.metrics_total("engine_heartbeat_age_seconds") > 4
        finally:
            engine.resume()
        until(lambda: http.get("/health").status_code == 200)
        for thread in asking:
            thread.join(30)
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [900] * 4
    assert watched.metrics_total("engine_restarts_total") == 0
    until(lambda: watched.metrics_total("engine_heartbeat_age_seconds") < 4)


def test_an_engine_that_hangs_for_good_is_replaced(watched: Server) -> None:
    engine, answers = engine_of(watched), []

    def ask() -> None:
        with watched.http() as http:
            answers.append(http.post(COMPLETIONS, json={"prompt": "Once", "max_tokens": 900, "ignore_eos": True}))

    engine.suspend()
    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(30)
    assert answers[0].status_code == 503
    assert "the engine hung: it sent no heartbeat" in answers[0].json()["error"]["message"]
    with watched.http() as http:
        until(lambda: http.get("/health").status_code == 200, 60)
        assert http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 3}).json()["usage"]["completion_tokens"] == 3
    assert engine_of(watched).pid != engine.pid
    assert not engine.is_running()
    assert watched.metrics_total("engine_restarts_total") == 1
    assert watched.metrics_total("engine_hangs_total") == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    model, _ = tiny_model("llama", seed=3)
    return str(save_checkpoint(model, tmp_path_factory.mktemp("tiny")))


def test_an_engine_that_hangs_while_it_starts_is_an_error(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "IMPORT_SECONDS", 2.0)
    children, descriptors = psutil.Process().children(), psutil.Process().num_fds()

    async def start() -> None:
        llm = AsyncLLM(folder, load_format="null", skip_tokenizer_init=True,
                       limits=HangLimits(degraded_seconds=1, hang_seconds=2))
        starting = asyncio.ensure_future(llm.start())
        while llm._keeper._process is None:
            await asyncio.sleep(0.01)
        os.kill(llm._keeper._process.pid, signal.SIGSTOP)
        with pytest.raises(SpilloverError, match=r"the engine hung: it sent no heartbeat .* while starting"):
            await starting

    asyncio.run(asyncio.wait_for(start(), 60))
    assert psutil.Process().children() == children
    assert psutil.Process().num_fds() == descriptors


def test_what_is_heard_is_what_the_engine_last_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front sees the engine's latest activity however rarely it looks; silence counts while it is awake."""
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.002)
    rng, ours = random.Random(0), Heartbeat()
    pulse = Pulse(ours.write_end)
    limits = HangLimits(degraded_seconds=1, hang_seconds=5, step_seconds=10)
    for _ in range(100):
        activity, steps = rng.choice([IMPORTING, LOADING, IDLE, STEP, CALL]), rng.randrange(10**6)
        pulse.at(activity, steps)
        time.sleep(0.01)
        ours.poll()
        if (ours.activity, ours.steps) != (activity, steps):  # on a busy machine the thread may not have run yet
            until(lambda activity=activity, steps=steps: (ours.poll(), (ours.activity, ours.steps))[1]
                  == (activity, steps))
        assert ours.hang(limits) is None
    endless = HangLimits(step_seconds=0.01)
    pulse.at(STEP, 7)
    until(lambda: (ours.poll(), ours.hang(endless))[1] is not None)
    assert (ours.hang(endless) or "").startswith("hung: it was in a step (7 done before it) for")
    pulse.at(IDLE)  # may last indefinitely
    until(lambda: (ours.poll(), ours.activity)[1] == IDLE)
    time.sleep(0.05)
    ours.poll()
    assert ours.hang(endless) is None
    clock = [time.monotonic()]
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 10**6)
    time.sleep(0.1)  # the thread's last beat
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    ours.poll()
    heard, awake = ours.silence, 0.0
    for _ in range(200):
        passed = rng.choice([0.1, 0.25, 0.9, 3600.0])
        clock[0] += passed
        awake += min(passed, 1.0)
        ours.poll()
        assert ours.silence == pytest.approx(heard + awake)
        assert (ours.hang(limits) is not None) == (ours.silence > (300 if ours.activity == IMPORTING else 5))
    ours.close()

