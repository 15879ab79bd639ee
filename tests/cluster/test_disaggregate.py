"""Separate prefill and decode: when a prompt is computed elsewhere, and that no request is lost if that fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.cli.cluster.replicas import check_replicas, own_pool
from spillover.cli.cluster.router import MODES as OFFERED
from spillover.cli.cluster.router import check_prefill
from spillover.cluster.disaggregate import MIN_BLOCKS, MODES, Mode, split
from spillover.cluster.fleet import ROLE_SECONDS, Fleet, Keys, Prompt
from spillover.cluster.keys import TEXT, prompt_only
from spillover.cluster.policy import LeastLoad
from spillover.cluster.replica import ReplicaReport
from spillover.cluster.serve import Router
from spillover.cluster.watch import store_name
from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError
from spillover.memory.shared_pool.client import ask_owner
from spillover.memory.shared_pool.wire import Ask, Report
from support.models.text_model import TEXT as WORDS
from support.models.text_model import write_text_model
from support.pool_process import PoolProcess
from support.servers.fake_replica import FakeReplica, routed
from support.servers.running_server import running, until

BLOCK = 16


def fleet_of(count: int, pool_seconds: float = 0.0, token_seconds: float = 1e-3) -> Fleet:
    fleet = Fleet(LeastLoad())
    for place in range(count):
        replica = fleet.add(f"r{place}")
        replica.ready = True
        replica.update(ReplicaReport(token_seconds, stores={"/pool": pool_seconds}))
    return fleet


def decided(fleet: Fleet, blocks: int, running: tuple[int, ...], mode: Mode) -> tuple[str, str | None]:
    """Return the replica that decodes a prompt of new blocks, and the one that computes it, if another."""
    for replica, count in zip(fleet.replicas, running, strict=True):
        replica.update(ReplicaReport(1e-3, stores=replica.report.stores, running=count))
    prompt = Prompt(blocks * BLOCK + 3, {TEXT: Keys(range(1000, 1000 + blocks), BLOCK)})
    decision = fleet.decide(prompt, 0.0)
    assert decision is not None
    found = split(fleet, prompt, decision, 0.0, mode)
    if found is not None:
        assert found.decode.replica is decision.replica
        assert found.prefill.replica is not decision.replica
        assert found.timeout >= 2
    return decision.replica.name, None if found is None else found.prefill.replica.name


@given(blocks=st.integers(1, 400), pool=st.floats(0, 0.1), running=st.lists(st.integers(0, 50), min_size=3, max_size=3))
@settings(max_examples=60, deadline=None)
def test_auto_is_apart_only_where_people_wait_less(blocks: int, pool: float, running: list[int]) -> None:
    """A prompt is computed elsewhere only if that costs less: computing delays decoding, and blocks must move."""
    fleet = fleet_of(3, pool)
    decoder, first = decided(fleet, blocks, (running[0], running[1], running[2]), "auto")
    if first is None:
        return
    assert blocks >= MIN_BLOCKS
    busy = {f"r{place}": count for place, count in enumerate(running)}
    compute = (blocks * BLOCK + 3) * 1e-3
    assert busy[first] * compute + blocks * pool < busy[decoder] * compute


def test_a_prompt_goes_away_from_who_decodes_and_stays_where_nobody_does() -> None:
    fleet = fleet_of(2)
    assert decided(fleet, 64, (0, 0), "auto")[1] is None  # no request is delayed
    assert decided(fleet, 64, (0, 0), "always")[1] is not None
    assert decided(fleet, 64, (0, 0), "never")[1] is None
    assert decided(fleet, MIN_BLOCKS - 1, (9, 9), "always")[1] is None
    fleet.replicas[1].draining = True  # it gets no new work, not even prompts
    assert decided(fleet, 64, (9, 1), "always") == ("r0", None)
    fleet.replicas[1].draining = False
    fleet.replicas[1].report = ReplicaReport(1e-3, stores={"/another": 0.0})
    assert split(fleet, *_asked(fleet), 0.0, "always") is None  # they share no store


def _asked(fleet: Fleet) -> tuple[Prompt, Any]:
    prompt = Prompt(999, {TEXT: Keys(range(62), BLOCK)})
    return prompt, fleet.decide(prompt, 0.0)


BODY = {"model": "fake", "prompt": "Once upon a time " * 200, "stream": True, "max_tokens": 7, "n": 2, "stop": ["x"]}
Scene = Callable[[httpx.AsyncClient, list[FakeReplica], Router], Awaitable[None]]


def play(scene: Scene, count: int = 2) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), routed(count, disaggregation="always") as (client, replicas, router):
            for replica in router.fleet.replicas:
                replica.report = ReplicaReport(1e-4, stores={"/pool": 0.0})
            await scene(client, replicas, router)
            assert not any(replica.flights for replica in router.fleet.replicas)

    asyncio.run(main())


def answered_by(answer: httpx.Response) -> str:
    assert answer.status_code == 200
    found: str = next(json.loads(line[6:])["from"] for line in answer.text.splitlines() if line.startswith("data: {"))
    return found


def test_the_prompt_is_computed_first_and_the_answer_is_the_others() -> None:
    async def scene(client: httpx.AsyncClient, replicas: list[FakeReplica], router: Router) -> None:
        decoder = answered_by(await client.post("/v1/completions", json=BODY))
        first, second = sorted(replicas, key=lambda replica: replica.name == decoder)
        assert first.bodies == [{"model": "fake", "prompt": BODY["prompt"], "max_tokens": 1, "stream": False}]
        assert second.bodies == [BODY | {"kv_transfer_params": {"do_remote_prefill": True}}]
        assert f'remote_prefills_total{{outcome="computed",replica="{first.name}"}} 1.0' in (
            await client.get("/metrics")).text

    play(scene)


@pytest.mark.parametrize("how", ["refuse", "busy", "drop"])
def test_whatever_becomes_of_the_first_the_answer_comes(how: str) -> None:
    async def scene(client: httpx.AsyncClient, replicas: list[FakeReplica], router: Router) -> None:
        decoder = answered_by(await client.post("/v1/completions", json=BODY))
        for replica in replicas:
            if replica.name != decoder:
                replica.how = how
        for turn in range(4):
            answered_by(await client.post("/v1/completions", json=BODY | {"prompt": f"{turn} " * 2000}))
        assert "failed" in (await client.get("/metrics")).text

    play(scene)


@pytest.mark.parametrize(("body", "asked"), [
    ({"prompt": [1, 2], "max_tokens": 9, "temperature": 1}, {"prompt": [1, 2], "temperature": 1, "max_tokens": 1}),
    ({"messages": [], "max_completion_tokens": 9, "tools": [1]}, {"messages": [], "max_completion_tokens": 1,
                                                                  "tools": [1]}),
    ({"input": "x", "max_output_tokens": 9, "store": True}, {"input": "x", "max_output_tokens": 1}),
])
def test_the_first_request_asks_for_the_prompt_and_one_token(body: dict[str, Any], asked: dict[str, Any]) -> None:
    made = prompt_only(json.dumps(body).encode())
    assert made is not None
    assert json.loads(made) == asked | {"stream": False}
    assert prompt_only(b"[1]") is prompt_only(b"{") is None


def test_one_replica_is_refused_and_several_get_a_pool_where_no_store_is_named() -> None:
    assert OFFERED == MODES
    with pytest.raises(SpilloverError, match="needs --replicas 2 or more"):
        check_replicas(EngineConfig(), 1, [], "auto")
    check_replicas(EngineConfig(), 2, [], "auto")
    with own_pool(EngineConfig(), "auto", 64 << 20) as theirs:
        assert theirs.host_pool is not None
        assert theirs.spill == "eager"
        assert ask_owner(Path(theirs.host_pool), Ask(), Report, 10.0).capacity > 0
    assert not Path(theirs.host_pool).exists()
    for named in (EngineConfig(host_pool="/tmp/pool"), EngineConfig(remote="redis://10.0.0.9")):
        with own_pool(named, "auto", 64 << 20) as theirs:
            assert theirs == replace(named, spill="eager")


def test_blocks_travel_through_a_pool_between_real_replicas(tmp_path: Path) -> None:
    """Blocks move through a pool; if its process has died, missing blocks are computed, with the same text."""
    write_text_model(tmp_path)
    flags = ("--device", "cpu", "--max-model-len", "2048", "--num-gpu-blocks-override", "600", "--restore", "always")
    with PoolProcess(64 << 20) as pool, running(
            str(tmp_path), "--replicas", "2", *flags, "--host-pool", str(pool.path), "--disaggregation", "always"
    ) as server, server.http() as http:
        until(lambda: all(each["index_state"] == "exact" for each in http.get("/replicas").json()["replicas"]))

        def answer(place: int, **fields: Any) -> tuple[str, int]:
            asked = [{"role": "user", "content": f"Conversation {place % 4}. {WORDS[:800]}"}]
            reply = http.post("/v1/chat/completions", json={"messages": asked, "max_tokens": 6, "temperature": 0,
                                                            "ignore_eos": True, **fields})
            assert reply.status_code == 200, reply.text
            body = reply.json()
            return (body["choices"][0]["message"]["content"],
                    body["usage"]["prompt_tokens_details"]["cached_tokens"])

        apart = [answer(place) for place in range(4)]
        assert sum(cached for _, cached in apart) > 0, "nothing was found of what the others had computed"
        assert server.metrics_total("router_remote_prefills_total") >= 3
        pool.kill()
        alone = [answer(place, cache_salt="another") for place in range(4)]
        assert [text for text, _ in alone] == [text for text, _ in apart]


@given(running=st.lists(st.integers(0, 40), min_size=3, max_size=3), waiting=st.integers(0, 4000))
@settings(max_examples=40, deadline=None)
def test_a_replica_for_prompts_decodes_only_where_all_others_are_far_behind(running: list[int], waiting: int) -> None:
    fleet = fleet_of(3)
    fleet.replicas[0].prefill_role = True
    for replica, count in zip(fleet.replicas, running, strict=True):
        replica.update(ReplicaReport(1e-3, stores=replica.report.stores, running=count,
                          waiting_tokens=0 if replica.prefill_role else waiting))
    prompt, decision = _asked(fleet)
    if waiting * 1e-3 <= ROLE_SECONDS:
        assert not decision.replica.prefill_role
        found = split(fleet, prompt, decision, 0.0, "always")
        assert found is not None
    fleet.replicas[1].ready = fleet.replicas[2].ready = False
    left = fleet.decide(prompt, 0.0)
    assert left is not None
    assert left.replica.prefill_role, "a role is no wall"


def test_what_is_brought_teaches_nothing_of_the_least_time() -> None:
    fleet = fleet_of(2)
    prompt, decision = _asked(fleet)
    found = split(fleet, prompt, decision, 0.0, "always")
    assert found is not None
    flight = fleet.send(prompt, found.decode, 0.0)
    fleet.begin(flight, 0.7)
    fleet.end(flight, 0.8)
    rates = decision.replica.rates
    assert rates is not None
    assert rates.least_seconds == 0
    known = decision._replace(prediction=decision.prediction._replace(compute=0.0, cached_tokens=prompt.tokens - 1))
    flight = fleet.send(prompt, known, 1.0)
    fleet.begin(flight, 1.2)
    fleet.end(flight, 1.3)
    rates = decision.replica.rates
    assert rates is not None
    assert rates.least_seconds == pytest.approx(0.2, abs=0.01)


def test_stores_of_one_machine_are_not_taken_for_anothers() -> None:
    for name in ("/run/pool.sock", "unix:///run/valkey", "redis://127.0.0.1:6379", "redis://localhost:6379/1"):
        assert store_name(name, "http://10.0.0.1:8000") != store_name(name, "http://10.0.0.2:8000")
        assert store_name(name, "http://10.0.0.1:8000") == store_name(name, "http://10.0.0.1:9000")
    remote = "redis://10.0.0.9:6379"
    assert store_name(remote, "http://10.0.0.1:8000") == store_name(remote, "http://10.0.0.2:8000") == remote


@pytest.mark.parametrize(("prefill", "count", "mode", "said"), [
    (1, 2, "never", "needs --disaggregation"), (2, 2, "always", "leaves none of 2 servers to decode")])
def test_roles_that_cannot_be_are_refused(prefill: int, count: int, mode: str, said: str) -> None:
    with pytest.raises(SpilloverError, match=said):
        check_prefill(prefill, count, mode)
    check_prefill(1, 3, "auto")
