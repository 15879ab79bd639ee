"""KV events over sockets: a subscriber recovers from any loss, and the engine never waits for one."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from spillover.engine.events.config import KVEventsConfig
from spillover.engine.events.journal import Journal
from spillover.engine.events.log import KVEventLog, Stored
from spillover.engine.events.publisher import EventPublisher, start_events
from spillover.memory.kv.kv_cache import KVCache
from support.events.event_worlds import options_of, requests, truth
from support.events.kv_mirror import Subscriber
from support.tiered_world import SIZE, World, prompt


def addresses(folder: Path) -> dict[str, Any]:
    return {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}


def published(folder: Path, world: World, **options: Any) -> None:
    world.engine.events = start_events(KVEventsConfig(**addresses(folder), **options), world.kv, world.connector)


def joined(folder: Path, hwm: int = 1000) -> Subscriber:
    """Return a subscriber that starts with a snapshot."""
    subscriber = Subscriber(**addresses(folder), hwm=hwm)
    subscriber.snapshot()
    return subscriber


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kept", [3, 10_000], ids=["short buffer", "long buffer"])
def test_whatever_is_lost_is_healed(tmp_path: Path, seed: int, kept: int) -> None:
    """After random losses of batches and restarts of the engine on its disk, the mirror is exact."""
    rng, losses = random.Random(seed), random.Random(seed)
    subscriber = None
    for _ in range(3):
        world = World(**options_of("host and disk", tmp_path / "kv"))
        published(tmp_path, world, buffer_steps=kept)
        subscriber = subscriber or joined(tmp_path)
        for asked, salt in requests(rng, 10):
            world.ask(asked, salt=salt)
            if rng.random() < 0.15:
                world.scheduler.reset_prefix_cache(external=rng.random() < 0.3)
            subscriber.receive(lambda: losses.random() < 0.3)
        world.ask(prompt(7, 40))
        if rng.random() < 0.7:
            subscriber.receive()
            subscriber.heal()
        else:
            subscriber.snapshot()
        assert subscriber.mirror.held == truth(world)
        assert subscriber.mirror.held
        if rng.random() < 0.5:
            world.close()  # publishes an event
        else:
            world.connector.close(time.monotonic() + 10)  # as after kill -9: no event is published
            _abandon(world.engine.events)
    assert subscriber is not None
    assert subscriber.replays + subscriber.snapshots > 1
    subscriber.close()


def _abandon(events: Any) -> None:
    assert isinstance(events, EventPublisher)
    events._publish = lambda records, cleared=False: None  # type: ignore[method-assign]
    events.close()


def test_a_restart_is_a_gap_that_a_subscriber_sees(tmp_path: Path) -> None:
    world = World()
    published(tmp_path, world)
    subscriber = joined(tmp_path)
    world.ask(prompt(1, 30))
    subscriber.heal()
    before = subscriber.mirror.sequence
    assert before is not None
    assert subscriber.mirror.held
    _abandon(world.engine.events)
    again = World()
    published(tmp_path, again)
    for seed in range(20):  # more batches than the first engine had sent
        again.ask(prompt(100 + seed, 9))
    subscriber.receive()
    subscriber.heal()
    assert subscriber.mirror.held == truth(again)
    assert subscriber.mirror.sequence is not None
    assert subscriber.mirror.sequence > before + 1
    again.close()
    world.engine.close()
    subscriber.close()


def test_an_engine_that_ends_holds_nothing(tmp_path: Path) -> None:
    world = World(host=12)
    published(tmp_path, world)
    subscriber = joined(tmp_path)
    world.ask(prompt(1, 60))
    subscriber.heal()
    assert subscriber.mirror.held
    world.close()
    deadline = time.monotonic() + 10
    while subscriber.mirror.held and time.monotonic() < deadline:
        subscriber.wait()
    assert not subscriber.mirror.held
    subscriber.close()


def test_a_reset_of_an_idle_engine_is_told(tmp_path: Path) -> None:
    world = World()
    published(tmp_path, world)
    subscriber = joined(tmp_path)
    world.ask(prompt(1, 30))
    subscriber.heal()
    assert subscriber.mirror.held
    world.scheduler.reset_prefix_cache()  # no step follows
    subscriber.receive()
    while subscriber.mirror.held:
        subscriber.wait()
    world.close()
    subscriber.close()


def test_topics_are_as_asked(tmp_path: Path) -> None:
    world = World()
    published(tmp_path, world, topic="kv@here@model")
    subscriber = Subscriber(**addresses(tmp_path), topic="kv@here")
    other = Subscriber(**addresses(tmp_path), topic="kv@there")
    subscriber.snapshot()
    other.snapshot()
    deadline = time.monotonic() + 10
    while subscriber.mirror.sequence == other.mirror.sequence and time.monotonic() < deadline:
        world.ask(prompt(random.randrange(1000), 20))
        subscriber.receive()
    assert other.receive() == 0
    assert subscriber.mirror.sequence is not None
    world.close()
    subscriber.close()
    other.close()


@pytest.mark.parametrize("frames", [[b"", b"12345"], [b"garbage"], [b"", b"", b"", b""], [b"x", b"kv_snapshot"]])
def test_a_bad_request_harms_nobody(tmp_path: Path, frames: list[bytes]) -> None:
    world = World()
    published(tmp_path, world)
    subscriber = joined(tmp_path)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(addresses(tmp_path)["replay_endpoint"])
        socket.setsockopt(zmq.LINGER, 0)
        socket.send_multipart(frames)
        assert socket.poll(5000)
        assert socket.recv_multipart() == [b"", b"\xff" * 8, b""]
    world.ask(prompt(1, 30))
    subscriber.heal()
    assert subscriber.mirror.held == truth(world)
    world.close()
    subscriber.close()


def test_a_subscriber_that_reads_nothing_loses_batches_and_sees_it(tmp_path: Path) -> None:
    """A subscriber that never reads delays no other: it loses batches, and sees it when it reads."""
    log = KVEventLog(KVCache(8, 4096, (None,)).tree)
    journal = Journal(4096, (None,), 10_000)
    publisher = EventPublisher(KVEventsConfig(**addresses(tmp_path), hwm=2), log, journal)
    silent, other = joined(tmp_path, hwm=2), joined(tmp_path)

    def publish(number: int) -> None:
        before, deadline = journal.sequence, time.monotonic() + 10
        log.records.append(Stored("GPU", number.to_bytes(32, "big"), 0, None, bytes(4 * 4096)))
        publisher.flush()
        while journal.sequence == before:
            assert time.monotonic() < deadline
            time.sleep(0)
        other.receive()

    start, count = journal.sequence, 300  # events of 4 KiB each: more than the buffers of a socket hold
    for number in range(count):
        publish(number)
    assert silent.receive() < journal.sequence - start
    deadline = time.monotonic() + 10
    while not silent.replays:  # the next batch shows at the latest that some are missing
        publish(count)
        count += 1
        silent.receive()
        assert time.monotonic() < deadline
    silent.heal()
    other.heal()
    assert len(other.mirror.held) == len(silent.mirror.held) == count
    assert silent.mirror.held == other.mirror.held
    publisher.close()
    silent.close()
    other.close()


def test_a_step_never_waits_for_the_publisher(tmp_path: Path) -> None:
    """A stuck publisher accepts no events, and every request is served nevertheless."""
    world = World()
    log = KVEventLog(world.kv.tree)
    world.kv.tree.listeners.append(log)
    stuck = threading.Event()

    class Stuck(Journal):
        def append(self, *_: Any, **__: Any) -> tuple[bytes, bytes]:
            stuck.wait(30)
            return super().append([])

    world.engine.events = EventPublisher(KVEventsConfig(**addresses(tmp_path)), log, Stuck(SIZE, (None,), 10))
    for seed in range(30):
        world.ask(prompt(seed, 40))
    assert len(log.records) > 100
    stuck.set()
    world.close()
