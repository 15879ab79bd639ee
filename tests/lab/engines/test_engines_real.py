"""Other engines for real, if an environment that contains them is given (make test-clients).

SPILLOVER_LLAMACPP_PYTHON: an interpreter with xllamacpp. SPILLOVER_VLLM_PYTHON: one with vLLM, and
SPILLOVER_VLLM_MODEL: a Hugging Face folder of a small model.
"""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

import psutil
import pytest

from spillover.lab.engines import Engine, EngineFailed, EngineSpec, make_engine
from spillover.lab.monitors import Recorder, default_monitors

pytestmark = pytest.mark.clients

PROMPT = list(range(1000, 1300))


def variable(name: str) -> str:
    if not os.environ.get(name):
        pytest.skip(f"{name} is not set: no engine to try")
    return os.environ[name]


def ask(engine: Engine) -> dict[str, Any]:
    asked = {"model": engine.running.model_name, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(engine.running.url + "/v1/completions", json.dumps(asked).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def exercise(spec: EngineSpec) -> None:
    """Check that a prompt is computed, found in the cache, and computed again after the cache was emptied."""
    with make_engine(spec) as engine:
        assert engine.running.version
        assert (engine.device_pool_tokens() or 0) >= 1024
        hits = []
        with Recorder(default_monitors(engine), hz=2) as recorder:
            for emptied in (False, False, True):
                if emptied:
                    assert engine.reset_cache().done
                before = engine.counters()
                assert ask(engine)["usage"]["prompt_tokens"] == len(PROMPT)
                after = engine.counters()
                assert after["prompt_tokens"] - before["prompt_tokens"] == len(PROMPT)
                assert after["generation_tokens"] - before["generation_tokens"] == 4
                hits.append(after["prefix_hits"] - before["prefix_hits"])
        assert hits[0] == hits[2] == 0
        assert hits[1] >= 128
        assert {"cpu", "process", "engine"} <= {row.source for row in recorder.rows}
        engine.check()
        processes = [psutil.Process(pid) for pid in engine.pids()]
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_llama_cpp_from_the_wheel() -> None:
    exercise(EngineSpec("llamacpp", args={"c": 4096, "np": 2, "cache-ram": 0},
                        python=variable("SPILLOVER_LLAMACPP_PYTHON")))


def test_llama_cpp_s_refusal_of_a_file_is_a_result() -> None:
    with pytest.raises(EngineFailed) as failed:
        make_engine(EngineSpec("llamacpp", __file__, python=variable("SPILLOVER_LLAMACPP_PYTHON"))).start()
    assert failed.value.cause == "no start"
    assert failed.value.log_tail


def test_vllm() -> None:
    exercise(EngineSpec("vllm", variable("SPILLOVER_VLLM_MODEL"), {"max-model-len": 2048, "enforce-eager": True},
                        env={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "HF_HUB_OFFLINE": "1"},
                        python=variable("SPILLOVER_VLLM_PYTHON")))
