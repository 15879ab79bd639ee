"""Spillover as an arm: the real server with the null model, so that it starts in seconds."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import spillover
from spillover.lab.engines import Engine, EngineFailed, EngineSpec, make_engine
from spillover.lab.engines.metrics_text import total
from spillover.lab.engines.process import status_of
from spillover.lab.monitors import Recorder, default_monitors

ARGS = {"load-format": "null", "max-model-len": 512, "num-gpu-blocks-override": 64, "block-size": 16,
        "enable-chunked-prefill": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Yield an engine with the null model, which hardly uses its prefix cache but has all routes."""
    spec = EngineSpec("spillover", args=ARGS, env={"OMP_NUM_THREADS": "1"}, ready_seconds=120)
    with make_engine(spec, tmp_path_factory.mktemp("logs")) as running:
        yield running


def generate(engine: Engine, tokens: int) -> dict[str, int]:
    body = json.dumps({"model": engine.running.model_name, "prompt": list(range(40)), "max_tokens": tokens,
                       "ignore_eos": True}).encode()
    request = urllib.request.Request(engine.running.url + "/v1/completions", body,
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        usage: dict[str, int] = json.load(answer)["usage"]
        return usage


def test_it_tells_its_version_its_pool_and_what_it_counts(engine: Engine) -> None:
    assert engine.running.version == spillover.__version__
    assert engine.device_pool_tokens() == 64 * 16
    assert engine.running.start_seconds > 0
    before = engine.counters()
    usage = generate(engine, 8)
    after = engine.counters()
    assert after["generation_tokens"] - before["generation_tokens"] == usage["completion_tokens"] == 8
    assert after["prompt_tokens"] - before["prompt_tokens"] == usage["prompt_tokens"] == 40
    assert {"prefix_queries", "prefix_hits", "preemptions"} <= set(after)
    engine.check()


def test_its_cache_can_be_emptied(engine: Engine) -> None:
    assert engine.reset_cache().done


def test_a_recorder_beside_it_sees_the_engine_and_its_processes(engine: Engine, tmp_path: Path) -> None:
    with Recorder(default_monitors(engine), hz=10) as recorder:
        generate(engine, 16)
        time.sleep(0.3)
    found = {(row.source, row.metric.partition("{")[0]) for row in recorder.rows}
    assert {("cpu", "busy_percent"), ("process", "rss_bytes"), ("engine", "spillover:generation_tokens_total")} <= found
    made = [row.value for row in recorder.rows if row.metric.startswith("spillover:generation_tokens_total")]
    assert made[-1] - made[0] == 16.0
    assert recorder.write_parquet(tmp_path / "rows.parquet").stat().st_size > 0


def test_an_engine_process_that_died_and_came_back_has_crashed(engine: Engine) -> None:
    """Last in this file: the supervisor restarts the engine and the server is healthy, but the run has crashed."""
    assert engine.running.pid is not None
    children = psutil.Process(engine.running.pid).children(recursive=True)
    os.kill(max(children, key=lambda child: child.memory_info().rss).pid, signal.SIGKILL)
    end = time.monotonic() + 90
    while not total(engine.metrics(), "spillover:engine_restarts") or status_of(engine.running.url + "/health") != 200:
        assert time.monotonic() < end, "the supervisor did not start it again"
        time.sleep(0.1)
    with pytest.raises(EngineFailed, match="died and was restarted") as failed:
        engine.check()
    assert failed.value.cause == "crash"
