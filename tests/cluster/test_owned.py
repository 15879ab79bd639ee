"""Servers owned by a router: as many as the load needs, restarted when they die, on Ray wherever there is room."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec
import pytest

import spillover
from spillover.cli.cluster.fleet_options import FleetOptions
from spillover.cli.cluster.replicas import ray_resources
from spillover.cluster import fleet
from spillover.cluster.owned import autoscale, ray_actor, scaling
from spillover.cluster.owned.autoscale import ScaleSettings
from spillover.cluster.owned.ray_server import RayOptions, RayServer, connect
from spillover.cluster.owned.replicas import OwnedReplicas, OwnedServer
from spillover.cluster.serve import Router
from spillover.cluster.settings import RouterSettings
from spillover.cluster.upstream import Upstream
from spillover.cluster.watch import WatchSettings
from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError
from spillover.server.listen import listen
from spillover.server.replica import News, ReplicaLaunch
from spillover.server.settings import ServerSettings
from support.servers.fake_ray import FakeRay
from support.servers.fake_replica import FakeReplica


class FakeServer:
    """An owned server whose replica is a fake one."""

    def __init__(self, place: int) -> None:
        self.replica = FakeReplica(f"fake-{place}")
        self.started = 0.0
        self.spawned = 0
        self.fails: str | None = None
        self._ended = asyncio.Event()

    async def spawn(self) -> str:
        self.spawned += 1
        self._ended = asyncio.Event()
        self.replica.port = 0
        await self.replica.start()
        return f"http://127.0.0.1:{self.replica.port}"

    async def news(self) -> AsyncIterator[News]:
        yield News(progress=("Loading", 1, 2))
        yield News(failed=self.fails) if self.fails else News(ready=True)

    async def ended(self) -> str:
        await self._ended.wait()
        return "signal 9"

    async def stop(self) -> None:
        await self.replica.stop()

    async def die(self) -> None:
        await self.replica.stop()
        self._ended.set()


@contextlib.asynccontextmanager
async def owned(servers: list[OwnedServer], count: int, scale: ScaleSettings | None = None,
                ) -> AsyncIterator[tuple[httpx.AsyncClient, Router]]:
    replicas = OwnedReplicas(servers, "key", count=count, on_plan=lambda plan: None,
                             on_progress=lambda *progress: None)
    settings = RouterSettings(scale=scale, wait_seconds=3.0, drain_seconds=3.0, log_requests=False,
                              watch=WatchSettings(health_seconds=0.5))
    router = Router(settings, [(f"replica-{place}", Upstream("http://127.0.0.1:1")) for place in range(len(servers))],
                    replicas)
    ready = asyncio.Event()
    with listen("127.0.0.1", 0) as listening:
        running = asyncio.create_task(router.run(listening, ready.set))
        try:
            waits = asyncio.ensure_future(ready.wait())
            await asyncio.wait((running, waits), return_when=asyncio.FIRST_COMPLETED, timeout=10)
            waits.cancel()
            if running.done():
                running.result()
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}",
                                         timeout=10) as client:
                yield client, router
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)


async def ask(client: httpx.AsyncClient, word: str = "word") -> int:
    reply = await client.post("/v1/completions", json={"prompt": f"{word} " * 2000, "stream": True, "max_tokens": 5})
    return reply.status_code


def ready(router: Router) -> list[int]:
    return [replica.index for replica in router.fleet.replicas if replica.ready]


def test_replicas_are_added_under_load_and_leave_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscale, "UP_SECONDS", 0.05)
    monkeypatch.setattr(fleet, "BUSY_SECONDS", 0.1)  # the load ends soon
    monkeypatch.setattr(scaling, "CHECK_SECONDS", 0.02)

    async def run() -> None:
        servers = [FakeServer(place) for place in range(3)]
        async with owned([*servers], 1, ScaleSettings(1, 3, 0.1, 0.3)) as (client, router):
            assert ready(router) == [0]
            for server in servers:
                server.replica.how = "silent"
            asked = [asyncio.create_task(ask(client)) for _ in range(8)]
            await until(lambda: ready(router) == [0, 1, 2])
            text = (await client.get("/metrics")).text
            assert "spillover:router_target_replicas 3.0" in text
            listed = (await client.get("/replicas")).json()["replicas"]
            assert [each["ready"] for each in listed] == [True] * 3
            for server in servers:
                server.replica.how = "ok"
                server.replica.release()
            assert await asyncio.gather(*asked) == [200] * 8
            await until(lambda: len(ready(router)) == 1)
            assert [server.spawned for server in servers] == [1, 1, 1]
            gone = [place for place in range(3) if place not in ready(router)]
            assert all("not started" in router.fleet.replicas[place].why for place in gone)
            assert not any(replica.draining for replica in router.fleet.replicas)

    asyncio.run(run())


def test_a_replica_that_is_to_leave_ends_its_requests_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(fleet, "BUSY_SECONDS", 0.1)

    async def run() -> None:
        servers = [FakeServer(place) for place in range(2)]
        async with owned([*servers], 2, ScaleSettings(1, 2, 1000.0, 1.0)) as (client, router):
            for server in servers:
                server.replica.how = "silent"
            asked = [asyncio.create_task(ask(client, str(place))) for place in range(2)]
            await until(lambda: all(replica.flights for replica in router.fleet.replicas))
            await until(lambda: any(replica.draining for replica in router.fleet.replicas))
            assert len(ready(router)) == 2
            for server in servers:
                server.replica.release()
            assert await asyncio.gather(*asked) == [200, 200]
            await until(lambda: len(ready(router)) == 1)

    asyncio.run(run())


def test_a_dead_server_is_started_again_and_one_that_cannot_start_is_told_in_a_sentence() -> None:
    async def run() -> None:
        servers = [FakeServer(place) for place in range(2)]
        async with owned([*servers], 2) as (client, router):
            await servers[1].die()
            assert await ask(client) == 200
            await until(lambda: ready(router) == [0, 1] and servers[1].spawned == 2)
        failing = FakeServer(1)
        failing.fails = "there is no model"
        with pytest.raises(SpilloverError, match="replica 1 cannot start: there is no model"):
            async with owned([FakeServer(0), failing], 2):
                pass

    asyncio.run(run())


def test_a_replica_that_cannot_be_added_leaves_the_others_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscale, "UP_SECONDS", 0.0)
    monkeypatch.setattr(scaling, "CHECK_SECONDS", 0.01)

    async def run() -> None:
        servers = [FakeServer(place) for place in range(2)]
        servers[1].fails = "no machine has a GPU free"
        async with owned([*servers], 1, ScaleSettings(1, 2, 0.1, 9.0)) as (client, router):
            servers[0].replica.how = "silent"
            asked = asyncio.create_task(ask(client))
            await until(lambda: "no machine has a GPU free" in router.fleet.replicas[1].why)
            await asyncio.sleep(0.1)
            assert servers[1].spawned == 1  # not repeatedly
            servers[0].replica.release()
            assert await asked == 200

    asyncio.run(run())


class FakeProcess:
    """A substitute for a server's process that records its arguments."""

    made: list[FakeProcess]

    def __init__(self, launch: Callable[[int], bytes], environment: dict[str, str], **given: str) -> None:
        self.launch = msgspec.msgpack.decode(base64.b64decode(launch(7)), type=ReplicaLaunch)
        self.given = given
        self.stopped = False
        self.made.append(self)

    async def spawn(self) -> str:
        return f"http://{self.given['address']}:4321"

    async def line(self) -> bytes:
        return base64.b64encode(msgspec.msgpack.encode(News(ready=True)))

    async def ended(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    async def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    made = FakeRay()
    FakeProcess.made = []
    monkeypatch.setattr(ray_actor, "ServerProcess", FakeProcess)
    monkeypatch.setitem(sys.modules, "ray", made)
    return made


def server_on(ray: FakeRay, seconds: float = 5.0, **resources: float) -> RayServer:
    return RayServer(ray, ReplicaLaunch(EngineConfig(), ServerSettings(), -1),
                     RayOptions(resources or {"CPU": 1.0}, seconds))


def test_a_replica_on_ray_has_ports_of_its_own_and_is_reached_past_ray(ray: FakeRay) -> None:
    async def run() -> None:
        server = server_on(ray)
        assert await server.spawn() == "http://127.0.0.1:4321"  # only the router's own machine can connect
        assert [news.ready async for news in _first(server.news())] == [True]
        await server.stop()
        await server.stop()
        (process,) = FakeProcess.made
        assert process.stopped
        assert process.given["host"] == "127.0.0.1"
        assert process.launch.listening == 7
        events = json.loads(process.launch.config.kv_events_config or "")
        assert events["endpoint"] != events["replay_endpoint"]
        assert events["endpoint"].startswith("tcp://127.0.0.1:")
        assert not ray.actors
        assert ray.cpus == 2.0

        addresses = iter(["10.0.0.9", "10.0.0.7"])  # of the actor's machine, then of the router's
        ray.util.get_node_ip_address = lambda: next(addresses)
        assert await server.spawn() == "http://10.0.0.9:4321"
        assert FakeProcess.made[1].given["host"] == "0.0.0.0"
        assert "tcp://*:" in (FakeProcess.made[1].launch.config.kv_events_config or "")

    asyncio.run(run())


def test_a_lost_actor_or_machine_is_an_end_and_the_next_start_is_anywhere(ray: FakeRay) -> None:
    async def run() -> None:
        server = server_on(ray)
        await server.spawn()
        ended = asyncio.create_task(server.ended())
        await asyncio.sleep(0)
        ray.kill(ray.actors[0])
        assert await ended == "its actor was lost: The actor died unexpectedly before finishing this task."
        await server.spawn()
        assert len(ray.actors) == 1
        assert all(options["scheduling_strategy"] == "SPREAD" and options["max_restarts"] == 0
                   for options in ray.placed)

    asyncio.run(run())


def test_without_room_or_ray_there_is_a_sentence_and_no_wait(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        server = server_on(ray, 0.05, CPU=3.0, GPU=1.0)
        with pytest.raises(SpilloverError, match=r"had 3 CPU, 1 GPU free within 0.05 s \(free in all: 2 CPU, 0 GPU\)"):
            await server.spawn()
        assert not ray.actors
        monkeypatch.setattr(spillover, "__version__", "9.9")
        monkeypatch.setattr(ray_actor.ReplicaActor, "node", _old_node)
        with pytest.raises(SpilloverError, match=r"10\.0\.0\.9 has version 0\.0\.1 of this package, and the router 9"):
            await server_on(ray).spawn()
        assert not ray.actors

    asyncio.run(run())
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(SpilloverError, match=f"no Ray cluster answers at 127.0.0.1:{port}"):
        connect(f"127.0.0.1:{port}", 0.0)
    with listen("127.0.0.1", 0) as starting:
        starting.listen()
        ray.refuses = 1  # it accepts connections, but has no node info yet
        assert connect(f"127.0.0.1:{starting.getsockname()[1]}", 5.0) is ray
        ray.refuses = 9
        with pytest.raises(SpilloverError, match="Ray cannot be used: no node info"):
            connect(f"127.0.0.1:{starting.getsockname()[1]}", 0.0)
    monkeypatch.setattr(ray, "init", _no_start)
    with pytest.raises(SpilloverError, match="Ray cannot be used: The current node timed out"):
        connect(None, 0.0)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SpilloverError, match=r"pip install 'spillover\[ray\]'"):
        connect(None, 0.0)


def test_a_replica_needs_a_gpu_for_each_rank_where_there_are_gpus() -> None:
    asked = FleetOptions(2, 2, 2, ray=True)
    for flags, cluster, wanted in (
            ({}, {"CPU": 8.0}, {"CPU": 1.0}),
            ({}, {"CPU": 8.0, "GPU": 4.0}, {"CPU": 1.0, "GPU": 1.0}),
            ({"tensor_parallel_size": 4}, {"GPU": 4.0}, {"CPU": 1.0, "GPU": 4.0}),
            ({"device": "cuda"}, {"CPU": 8.0}, {"CPU": 1.0, "GPU": 1.0}),  # a machine with a GPU may join
            ({"device": "cpu"}, {"GPU": 4.0}, {"CPU": 1.0}),
            ({"load_format": "null"}, {"GPU": 4.0}, {"CPU": 1.0})):
        assert ray_resources(EngineConfig(**flags), asked, cluster) == wanted
    given = FleetOptions(2, 2, 2, ray=True, ray_resources={"GPU": 0.5})
    assert ray_resources(EngineConfig(), given, {"GPU": 4.0}) == {"GPU": 0.5}


def _no_start(**options: Any) -> None:
    raise Exception("The current node timed out during startup.")


async def _old_node(_actor: Any) -> ray_actor.Node:
    return ray_actor.Node("10.0.0.9", "0.0.1")


async def _first(news: AsyncIterator[News]) -> AsyncIterator[News]:
    yield await anext(news)
