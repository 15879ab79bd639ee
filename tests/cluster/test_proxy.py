"""The router over real sockets, with servers that fail in every way: which failures clients see, and which not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.cluster.replica import FAILURES, OPEN_SECONDS, Breaker
from spillover.cluster.serve import Router
from spillover.cluster.watch import WatchSettings
from support.servers.fake_replica import CHUNKS, FakeReplica, routed

BODY = {"model": "fake", "prompt": "Once upon a time", "stream": True}
Scene = Callable[[httpx.AsyncClient, list[FakeReplica], Router], Awaitable[None]]


def play(scene: Scene, count: int = 3, **changes: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), routed(count, **changes) as (client, replicas, router):
            await scene(client, replicas, router)
            assert router.proxy.in_flight == 0
            assert not any(replica.flights for replica in router.fleet.replicas)  # none is counted as running

    asyncio.run(main())


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(("how", "stream"), [("drop", True), ("drop", False), ("drop-head", True), ("refuse", True),
                                             ("refuse", False), ("busy", True)])
def test_a_failure_before_the_first_token_is_not_seen(how: str, stream: bool) -> None:
    async def scene(client: httpx.AsyncClient, replicas: list[FakeReplica], router: Router) -> None:
        replicas[0].how = replicas[1].how = how
        for _ in range(4):
            answer = await client.post("/v1/completions", json=BODY | {"stream": stream})
            assert answer.status_code == 200
            assert answer.headers["x-spillover-replica"] == "fake-2"
            if stream:
                assert [each["from"] for each in events(answer)[:CHUNKS]] == ["fake-2"] * CHUNKS
        assert answer.headers["x-request-id"]

    play(scene)


def test_a_failure_after_the_first_token_ends_the_stream_with_an_error() -> None:
    async def scene(client: httpx.AsyncClient, replicas: list[FakeReplica], router: Router) -> None:
        replicas[0].how = "drop-middle"
        answer = await client.post("/v1/completions", json=BODY)
        assert answer.status_code == 200
        *begun, last = events(answer)
        assert len(begun) == 2
        assert last["error"]["code"] == "replica_lost"
        assert len(replicas[0].bodies) == 1  # a request whose answer has begun is not repeated
        assert b"router_broken_streams_total" in (await client.get("/metrics")).content

    play(scene, count=1)


def test_a_killed_replica_is_left_at_once_and_taken_back_when_it_answers() -> None:
    async def scene(client: httpx.AsyncClient, replicas: list[FakeReplica], router: Router) -> None:
        replicas[0].how = replicas[1].how = "silent"
        waiting = [asyncio.create_task(client.post("/v1/completions", json=BODY)) for _ in range(4)]
        async with asyncio.timeout(5):
            await until(lambda: replicas[0].open == replicas[1].open == 2)
        await replicas[0].stop()  # it has two requests without output so far
        replicas[1].release()
        answers = await asyncio.gather(*waiting)
        assert [answer.status_code for answer in answers] == [200] * 4
        assert all(events(answer)[0]["from"] == "fake-1" for answer in answers)
        for _ in range(4):
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert not router.fleet.replicas[0].ready
        replicas[0].how = "ok"
        await replicas[0].start()
        async with asyncio.timeout(5):
            await until(lambda: router.fleet.replicas[0].ready)
        sources = {events(await client.post("/v1/completions", json={"prompt": f"{place} " * 200, "stream": True}))[0]
                   ["from"] for place in range(6)}
        assert sources == {"fake-0", "fake-1"}

    play(scene, count=2)


def test_a_silent_replica_loses_what_has_not_begun() -> None:
    """A hanging replica, which does not answer health checks either, loses its requests without output to others."""
    async def scene(client: httpx.AsyncClient, replicas: list[FakeReplica], router: Router) -> None:
        replicas[0].how = "silent"
        waiting = asyncio.create_task(client.post("/v1/completions", json=BODY))
        async with asyncio.timeout(5):
            await until(lambda: replicas[0].open == 1)
        replicas[0].healthy = False
        answer = await waiting
        assert events(answer)[0]["from"] == "fake-1"
        health = (await client.get("/health")).json()
        assert health == {"status": "ready", "replicas": 2, "ready": 1}

    play(scene, count=2)


def test_an_answer_that_stops_coming_ends_with_an_error() -> None:
    """A stalled answer ends with an error: a machine that is gone closes no connections."""
    async def scene(client: httpx.AsyncClient, replicas: list[FakeReplica], router: Router) -> None:
        replicas[0].how = "hang-middle"
        answer = await client.post("/v1/completions", json=BODY)
        came = events(answer)
        assert [each.get("place") for each in came[:2]] == [0, 1]
        assert came[-1]["error"]["code"] == "replica_lost"
        assert not router.fleet.replicas[0].ready
        replicas[0].release()

    play(scene, count=1, watch=WatchSettings(health_seconds=0.05))


def test_a_client_that_goes_away_ends_its_request() -> None:
    async def scene(client: httpx.AsyncClient, replicas: list[FakeReplica], router: Router) -> None:
        replicas[0].how = "silent"
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/completions", json=BODY, timeout=0.2)
        async with asyncio.timeout(5):
            await until(lambda: replicas[0].open == 0 and router.proxy.in_flight == 0)

    play(scene, count=1)


def test_back_pressure_has_a_status_and_a_time() -> None:
    async def scene(client: httpx.AsyncClient, replicas: list[FakeReplica], router: Router) -> None:
        for replica in replicas:
            replica.how = "busy"
        answer = await client.post("/v1/completions", json=BODY)
        assert answer.status_code == 429  # the servers' own status
        assert answer.json() == {"error": {"message": "busy"}}
        for replica in replicas:
            replica.how = "silent"
        waiting = [asyncio.create_task(client.post("/v1/completions", json=BODY)) for _ in range(3)]
        async with asyncio.timeout(5):
            await until(lambda: router.proxy.in_flight == 3)
        answer = await client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert "--max-in-flight" in answer.json()["error"]["message"]
        for replica in replicas:
            replica.release()
        assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}
        for replica in replicas:
            await replica.stop()
        answer = await client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        assert (await client.get("/health")).status_code == 503

    play(scene, count=2, max_in_flight=3, wait_seconds=0.3)


def test_a_draining_replica_gets_nothing_new() -> None:
    async def scene(client: httpx.AsyncClient, replicas: list[FakeReplica], router: Router) -> None:
        assert (await client.post("/replicas/fake-0/drain")).json()["draining"]
        for _ in range(4):
            assert events(await client.post("/v1/completions", json=BODY))[0]["from"] == "fake-1"
        assert not (await client.post("/replicas/fake-0/undrain")).json()["draining"]
        shown = (await client.get("/replicas")).json()["replicas"]
        assert [each["index_state"] for each in shown] == ["fallback", "fallback"]
        assert all(each["index_note"] for each in shown)  # a guess is always explained
        assert (await client.post("/replicas/nobody/drain")).status_code == 404

    play(scene, count=2)


def test_keys_sessions_and_stored_responses() -> None:
    async def scene(client: httpx.AsyncClient, replicas: list[FakeReplica], router: Router) -> None:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 401
        client.headers["Authorization"] = "Bearer right"
        assert (await client.post("/replicas/fake-0/drain")).status_code == 401  # requires the admin key
        went = {events(await client.post("/v1/completions", json=BODY | {"prompt": str(turn) * 300},
                                         headers={"X-Session-Id": "one"}))[0]["from"] for turn in range(4)}
        assert len(went) == 1
        for _ in range(4):
            stored = (await client.post("/v1/responses", json={"input": "Hello"})).json()
            went_on = await client.post("/v1/responses", json={"input": "On", "previous_response_id": stored["id"]})
            assert went_on.json()["from"] == stored["from"]
            assert (await client.get(f"/v1/responses/{stored['id']}")).json()["from"] == stored["from"]
        assert all("bearer right" in head.lower() for replica in replicas for head in replica.heads)

    play(scene, api_keys=("right",), admin_keys=("admin",))


def test_other_routes() -> None:
    async def scene(client: httpx.AsyncClient, replicas: list[FakeReplica], router: Router) -> None:
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "fake"
        assert (await client.get("/v1/completions")).status_code == 405
        assert (await client.post("/sleep")).status_code == 404
        assert (await client.get("/livez")).status_code == 200
        large = await client.post("/v1/completions", json=BODY | {"prompt": "x" * 5000})
        assert large.status_code == 413
        text = (await client.get("/metrics")).text
        assert 'spillover:router_index_state{replica="fake-0",state="fallback"} 1.0' in text
        assert "spillover:router_decision_seconds_count" in text

    play(scene, count=1, max_request_bytes=4096)


@given(st.lists(st.tuples(st.floats(0, 20), st.booleans()), max_size=60))
@settings(max_examples=50, deadline=None)
def test_a_breaker_opens_after_failures_and_tries_one_request_at_a_time(steps: list[tuple[float, bool]]) -> None:
    breaker, now, recent = Breaker(), 0.0, list[float]()
    for wait, fails in steps:
        now += wait
        was_open, allowed = breaker.is_open, breaker.allows(now)
        if not was_open:
            assert allowed
        if not allowed:
            continue
        breaker.sent()
        if was_open:
            assert not breaker.allows(now)  # until the trial request has finished
        if fails:
            breaker.failed(now)
            recent.append(now)
            assert breaker.is_open == (was_open or (len(recent) >= FAILURES and now - recent[-FAILURES] <= 60))
            if breaker.is_open:
                assert not breaker.allows(now + OPEN_SECONDS / 2)
        else:
            breaker.succeeded()
            if was_open and not breaker.is_open:
                recent.clear()
    if not breaker.is_open:
        for _ in range(FAILURES):
            breaker.failed(now)
        assert breaker.is_open
        assert breaker.allows(now + OPEN_SECONDS + 1)
