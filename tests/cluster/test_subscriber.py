"""Following KV events over sockets: this engine's with snapshots, vLLM's with replays only, and gaps in both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from spillover.cluster.index import PrefixIndex
from spillover.cluster.mirror import IndexState, Mirror
from spillover.cluster.subscriber import Subscriber, reachable
from spillover.cluster.watch import WatchSettings
from spillover.memory.kv.event_wire import END, GPU, SNAPSHOT, AllBlocksCleared, BlockStored, EventBatch


class Publisher:
    """Publishes blocks named 1, 2, ...; answers as vLLM does, which reads any request as a sequence number, or supports
    snapshots too."""

    def __init__(self, folder: Path, snapshots: bool, kept: int = 1000) -> None:
        self.addresses = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        self.snapshots = snapshots
        self.kept = kept
        self.sequence = -1
        self.asked: list[bytes] = []
        self._context = zmq.asyncio.Context()
        self._events, self._requests = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._events.bind(self.addresses[0])
        self._requests.bind(self.addresses[1])
        self._answering = asyncio.create_task(self._answer())

    @property
    def held(self) -> set[int]:
        return set(range(1, self.sequence + 2))

    async def publish(self, lost: bool = False) -> None:
        self.sequence += 1
        if not lost:
            await self._events.send_multipart((b"", self.sequence.to_bytes(8, "big"), self._batch(self.sequence)))

    def restart(self) -> None:
        self.sequence = -1

    async def close(self) -> None:
        self._answering.cancel()
        await asyncio.gather(self._answering, return_exceptions=True)
        self._context.destroy(linger=0)

    def _batch(self, sequence: int, cleared: bool = False) -> bytes:
        stored = BlockStored([sequence + 1], None, [], 4, None, GPU, None)
        return msgspec.msgpack.encode(EventBatch(time.time(), [*([AllBlocksCleared()] if cleared else []), stored]))

    async def _answer(self) -> None:
        while True:
            client, _, request = await self._requests.recv_multipart()
            self.asked.append(request)
            if request == SNAPSHOT and self.snapshots:
                for number in range(self.sequence + 1):
                    await self._requests.send_multipart((client, b"", self.sequence.to_bytes(8, "big"),
                                                         self._batch(number, cleared=number == 0)))
            else:
                first = max(int.from_bytes(request, "big"), self.sequence + 1 - self.kept)
                for number in range(first, self.sequence + 1):
                    await self._requests.send_multipart((client, b"", number.to_bytes(8, "big"), self._batch(number)))
            await self._requests.send_multipart((client, b"", END, b""))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("snapshots", [True, False])
def test_a_mirror_is_whole_again_after_gaps_and_restarts(tmp_path: Path, snapshots: bool) -> None:
    async def main() -> None:
        publisher, index = Publisher(tmp_path, snapshots), PrefixIndex()
        index.add(0)
        for _ in range(5):
            await publisher.publish()  # before the subscription
        mirror = Mirror(index, 0)
        following = asyncio.create_task(Subscriber(mirror, *publisher.addresses).run())
        try:
            await until(lambda: mirror.state is IndexState.EXACT and index.keys(0, GPU) == publisher.held)
            for lost in (False, True, True, False, False, True, False):
                await publisher.publish(lost)
            await until(lambda: mirror.state is IndexState.EXACT and index.keys(0, GPU) == publisher.held)
            publisher.restart()
            for _ in range(3):
                await publisher.publish()
            await until(lambda: mirror.state is IndexState.EXACT and index.keys(0, GPU) == publisher.held)
            assert mirror.gaps >= 1
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await publisher.close()

    asyncio.run(main())


def test_what_is_lost_for_good_is_never_called_exact(tmp_path: Path) -> None:
    async def main() -> None:
        publisher, index = Publisher(tmp_path, snapshots=False, kept=2), PrefixIndex()
        index.add(0)
        for _ in range(9):
            await publisher.publish()
        mirror = Mirror(index, 0)
        following = asyncio.create_task(Subscriber(mirror, *publisher.addresses).run())
        try:
            await until(lambda: len(publisher.asked) >= 2)
            while not index.keys(0, GPU):  # a subscription takes a moment
                await publisher.publish()
                await asyncio.sleep(0.02)
            heard = len(index.keys(0, GPU))
            await publisher.publish()
            await until(lambda: len(index.keys(0, GPU)) > heard)
            assert index.keys(0, GPU) < publisher.held
            assert mirror.state is IndexState.DEGRADED
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await publisher.close()

    asyncio.run(main())


def test_an_endpoint_is_reached_at_its_servers_address() -> None:
    assert reachable("tcp://*:5557", "http://10.0.0.7:8000") == "tcp://10.0.0.7:5557"
    assert reachable("tcp://[::]:5557", "http://[fe80::1]:8000") == "tcp://[fe80::1]:5557"
    assert reachable("tcp://10.0.0.9:5557", "http://10.0.0.7:8000") == "tcp://10.0.0.9:5557"
    assert reachable("ipc:///run/kv", "http://10.0.0.7:8000") == "ipc:///run/kv"


def test_every_server_may_have_ports_of_its_own() -> None:
    assert WatchSettings().ports(3) == (None, None)
    assert WatchSettings(events_ports=(5557,), replay_ports=(5558,)).ports(3) == (5557, 5558)
    apart = WatchSettings(events_ports=(5557, 0, 5559), replay_ports=(0, 0, 5560))
    assert [apart.ports(place) for place in range(3)] == [(5557, None), (None, None), (5559, 5560)]
