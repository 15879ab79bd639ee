"""`spill serve --replicas 2` with a real model: prefixes are reused, killed replicas restart, no process remains."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from spillover.cli.cluster.replicas import check_replicas, replica_config, visible_gpus
from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError
from support.models.text_model import TEXT, write_text_model
from support.servers.running_server import Server, running, until


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    write_text_model(folder)
    with running(str(folder), "--replicas", "2", "--device", "cpu", "--max-model-len", "2048",
                 "--num-gpu-blocks-override", "600", "--host-memory", "20MB") as started:
        yield started


def replicas(server: Server) -> list[psutil.Process]:
    return [child for child in psutil.Process(server.process.pid).children()
            if "spillover.server.replica" in " ".join(child.cmdline())]


def answer(http: httpx.Client, text: str, **fields: object) -> dict[str, object]:
    reply = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}], "max_tokens": 4,
                                                    "temperature": 0, "ignore_eos": True, **fields})
    assert reply.status_code == 200, reply.text
    return {"from": reply.headers["x-spillover-replica"], **reply.json()["usage"]["prompt_tokens_details"],
            "text": reply.json()["choices"][0]["message"]["content"]}


def test_prefixes_are_found_again_where_they_were_computed(fleet: Server) -> None:
    with fleet.http() as http:
        until(lambda: all(each["index_state"] == "exact" for each in http.get("/replicas").json()["replicas"]))
        prompts = [f"Conversation {place}. {TEXT[:800]}" for place in range(4)]
        first = [answer(http, prompt) for prompt in prompts]
        assert {each["from"] for each in first} == {"replica-0", "replica-1"}
        second = [answer(http, prompt + " And then?") for prompt in prompts]
        for before, after in zip(first, second, strict=True):
            assert before["cached_tokens"] == 0
            assert after["from"] == before["from"]
            assert int(str(after["cached_tokens"])) >= 800
        salted = answer(http, prompts[0], cache_salt="another tenant")
        assert salted["cached_tokens"] == 0
        assert salted["text"] == first[0]["text"]
        told = {name.rpartition("{")[2]: value for name, value in fleet.metrics().items()
                if name.startswith("spillover:router_cached_tokens_total")}
        for place in range(2):  # the predicted cached tokens were found
            assert told[f'by="prediction",replica="replica-{place}"}}'] == pytest.approx(
                told[f'by="answer",replica="replica-{place}"}}'])


def test_a_killed_replica_costs_no_request_and_comes_back(fleet: Server) -> None:
    with fleet.http() as http, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(answer, http, f"{place}: {TEXT[:600]}", max_tokens=8) for place in range(24)]
        until(lambda: sum(each.done() for each in asked) >= 4)
        victim = replicas(fleet)[0]
        victim.kill()
        assert all(each.result()["text"] for each in asked)
        until(lambda: http.get("/health").json()["ready"] == 2, 60)
        until(lambda: all(each["index_state"] == "exact" for each in http.get("/replicas").json()["replicas"]))
        assert victim.pid not in [each.pid for each in replicas(fleet)]
        assert len(replicas(fleet)) == 2


def test_replicas_end_with_a_router_that_is_killed(fleet: Server) -> None:
    """Runs last, because it kills the server."""
    family = psutil.Process(fleet.process.pid).children(recursive=True)
    assert len(family) >= 4  # two fronts, two engines
    os.kill(fleet.process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    fleet.process.wait(10)
    fleet.process.returncode = 0  # its death was intended


def test_what_replicas_cannot_share_is_refused() -> None:
    for flags, count, gpus, words in (
            ({"kv_events_config": '{"enable_kv_cache_events": true}'}, 2, [], "--kv-events-config"),
            ({"enable_prefix_caching": False}, 2, [], "--enable-prefix-caching"),
            ({}, 3, ["0", "1"], "--gpu-memory")):
        with pytest.raises(SpilloverError, match=words):
            check_replicas(EngineConfig.from_flags(**flags), count, gpus)
    check_replicas(EngineConfig(gpu_memory="8GB"), 3, ["0", "1"])
    check_replicas(EngineConfig(device="cpu"), 3, ["0", "1"])


def test_every_replica_has_folders_and_addresses_of_its_own(tmp_path: Path) -> None:
    config = EngineConfig(disk=(f"{tmp_path}/kv:1GB",))
    made = [replica_config(config, place, str(tmp_path)) for place in range(3)]
    assert len({each.disk for each in made}) == len({each.kv_events_config for each in made}) == 3
    assert made[1].disk == (f"{tmp_path}/kv/replica-1:1GB",)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "4, 6"}) == ["4", "6"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert visible_gpus({}, str(tmp_path / "none")) == []
