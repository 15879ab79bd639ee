"""KV events: whoever follows them knows what every tier holds, whatever is lost on the way; and nobody waits for it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spillover.engine.config import EngineConfig
from spillover.engine.events.config import KVEventsConfig
from spillover.engine.events.journal import Journal
from spillover.engine.events.log import KVEventLog, Record, Stored
from spillover.engine.events.publisher import EventPublisher, check_addresses, start_events
from spillover.engine.events.wire import block_hash
from spillover.errors import SpilloverError
from spillover.memory.kv.digest import prefix_keys, root_digest
from spillover.memory.kv.kv_cache import KVCache
from spillover.memory.tiers.base import Tier
from spillover.memory.tiers.disk import DiskTier
from spillover.memory.tiers.disks import Disks
from support.kv_mirror import BlockStored, Holdings, KVEventBatch, Mirror, OldBlockStored, Subscriber
from support.simulated_tiers import DictTier
from support.tiered_world import SIZE, World, prompt


def on_disk(path: Path, blocks: int = 24) -> Callable[[Callable[[], None]], Tier]:
    def make(wake: Callable[[], None]) -> Tier:
        payload = World().link.slot_bytes
        return DiskTier(path, blocks * 8192 + (64 << 10), payload, b"identity", {}, wake, segment_bytes=16 << 10)

    return make


def on_two_disks(path: Path) -> Callable[[Callable[[], None]], Tier]:
    def make(wake: Callable[[], None]) -> Tier:
        parts = [on_disk(path / name, 12)(wake) for name in ("one", "two")]
        return Disks([part for part in parts if isinstance(part, DiskTier)])

    return make


def truth(world: World) -> Holdings:
    """What the engine's own books say: medium, layer group, hash."""
    tree, found = world.kv.tree, set[tuple[str, int, int]]()
    for block in range(1, world.kv.pool.most + 1):
        if world.kv.pool.cached(block):
            node, group = tree.home(block)
            found.add(("GPU", group, block_hash(node.digest)))
    if world.store.keeps:
        found |= {("CPU", entry.key[-1], block_hash(entry.key[:-1])) for entry in world.store._host
                  if entry.ready and not entry.private and not entry.forgotten}
    for tier in world.tiers:
        for disk in tier.disks if isinstance(tier, Disks) else [tier] if isinstance(tier, DiskTier) else ():
            keys = [record.key for slot in disk._table.live() if (record := disk._table[slot].record) is not None]
            found |= {("STORAGE", key[-1], block_hash(key[:-1])) for key in keys if tier.has(key)}
    return found


class Followed:
    """A simulated engine and a mirror of it, without sockets: records go through the journal to the mirror."""

    def __init__(self, **options: Any) -> None:
        self.world = World(**options)
        self.log = KVEventLog(self.world.kv.tree)
        self.world.connector.tell(self.log)
        self.world.kv.tree.listeners.append(self.log)
        self.journal = Journal(SIZE, self.world.kv.windows, 50)
        self.mirror = Mirror()
        self.mirror.sequence = self.journal.sequence
        self.batches: list[tuple[int, bytes]] = []
        self.publish(cleared=True)

    def publish(self, cleared: bool = False) -> None:
        records: list[Record] = [self.log.records.popleft() for _ in range(len(self.log.records))]
        sequence, batch = self.journal.append(records, cleared)
        self.batches.append((int.from_bytes(sequence, "big"), batch))
        assert self.mirror.take(*self.batches[-1])

    def check(self) -> None:
        self.publish()
        assert self.mirror.held == truth(self.world)
        again = Mirror()
        replies = list(self.journal.snapshot())
        again.restore(self.journal.sequence, [batch for _, batch in replies])
        assert again.held == self.mirror.held
        assert {sequence for sequence, _ in replies} == {self.journal.sequence.to_bytes(8, "big")}


PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"host": 12},
    "disk": {"disk": on_disk},
    "host and disk": {"host": 10, "disk": on_disk},
    "host and two disks": {"host": 10, "disk": on_two_disks, "eager": True},
    "host, disk and remote": {"host": 10, "disk": on_disk,
                              "remote": lambda wake: DictTier(wake, "remote", lookup_delay=0.001)},
}


def options_of(place: str, folder: Path) -> dict[str, Any]:
    options = dict(PLACES[place])
    tiers = [options.pop("disk")(folder)] if "disk" in options else []
    if "remote" in options:
        tiers.append(options.pop("remote"))
    return {**options, "tiers": tiers}


def requests(rng: random.Random, count: int) -> Iterator[tuple[list[int], str | None]]:
    """Prompts that share beginnings, some under a salt."""
    beginnings = [prompt(seed, 16) for seed in range(4)]
    for _ in range(count):
        yield rng.choice(beginnings)[: rng.randrange(4, 17)] + prompt(rng.randrange(6), rng.randrange(1, 40)), (
            rng.choice([None, None, "tenant-a", "tenant-b"]))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("windows", [(None,), (None, 10), (6,)], ids=["full", "hybrid", "window"])
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30))
def test_a_mirror_holds_what_the_tiers_hold(tmp_path_factory: pytest.TempPathFactory, place: str,
                                            windows: tuple[int | None, ...], seed: int) -> None:
    """After every step, also in the middle of copies, aborts and resets, and after a restart."""
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("disk")
    for _ in range(2):  # the second time on what the first left on its disks
        followed = Followed(num_blocks=40 if len(windows) > 1 else 24, windows=windows, **options_of(place, folder))
        world = followed.world
        followed.check()
        for asked, salt in requests(rng, 8):
            live = [world.request(asked, rng.randrange(1, 9), salt)]
            while world.engine.has_work:
                if not world.engine.step():
                    world.engine.wait(0.001)
                followed.check()
                if rng.random() < 0.02:
                    world.scheduler.stop(live[0], "abort")
            if rng.random() < 0.08:
                world.scheduler.reset_prefix_cache(external=rng.random() < 0.5)
                followed.check()
        world.run()
        followed.check()
        assert any(medium == "GPU" for medium, _, _ in truth(world)) or not world.kv.tree.num_nodes
        world.close()


def test_every_tier_is_told_of(tmp_path: Path) -> None:
    followed = Followed(**options_of("host and disk", tmp_path))
    for seed in range(6):
        followed.world.ask(prompt(seed, 60))
    followed.check()
    assert {medium for medium, _, _ in followed.mirror.held} == {"GPU", "CPU", "STORAGE"}
    # A block keeps its name and its tokens on its way down.
    named = set(followed.mirror.tokens)
    assert {each for medium, _, each in followed.mirror.held if medium != "STORAGE"} <= named
    followed.world.close()


def test_names_are_those_that_anybody_can_compute() -> None:
    followed = Followed()
    asked = prompt(3, 30)
    followed.world.ask(asked, salt="pepper")
    followed.check()
    digest = root_digest(b"", "pepper")
    expected = [block_hash(key[:-1]) for key in prefix_keys(asked, SIZE, digest)]
    assert {("GPU", 0, each) for each in expected} <= followed.mirror.held
    parents = [None, *expected]
    for place, each in enumerate(expected):
        assert followed.mirror.tokens[each] == (parents[place], tuple(asked[place * SIZE : (place + 1) * SIZE]))
    followed.world.close()


def test_salts_are_never_told_and_keep_tenants_apart() -> None:
    followed = Followed(host=12)
    asked = prompt(5, 33)
    salts = [None, "tenant-a-secret", "tenant-b-secret"]
    for salt in salts:
        followed.world.ask(asked, salt=salt)
    for seed in range(10, 14):
        followed.world.ask(prompt(seed, 60), salt="tenant-a-secret")  # some go to host memory
    followed.check()
    sent = b"".join(batch for _, batch in (*followed.batches, *followed.journal.snapshot()))
    assert b"secret" not in sent
    assert b"tenant" not in sent
    hashes = [{block_hash(key[:-1]) for key in prefix_keys(asked, SIZE, root_digest(b"", salt))} for salt in salts]
    assert not hashes[0] & hashes[1]
    assert not hashes[1] & hashes[2]
    # A router that is told a request's salt knows which of the first blocks are for it; the others' mean nothing to it.
    firsts: dict[int, object] = {}
    for _, batch in followed.batches:
        for event in msgspec.msgpack.decode(batch, type=KVEventBatch).events:
            if isinstance(event, BlockStored) and event.extra_keys is not None:
                firsts |= {each: extra for each, extra in zip(event.block_hashes, event.extra_keys, strict=True)
                           if extra}
    for salt, named in zip(salts, hashes, strict=True):
        expected = None if salt is None else (root_digest(b"", salt)[:16].hex(),)
        assert {firsts.get(each) for each in named} - {None} == ({expected} if expected else set())
    followed.world.close()


def test_layer_groups_are_told_apart() -> None:
    followed = Followed(num_blocks=40, windows=(None, 10))
    followed.world.ask(prompt(1, 50))
    followed.check()
    events = [event for _, batch in followed.batches for event in
              msgspec.msgpack.decode(batch, type=KVEventBatch).events if isinstance(event, BlockStored)]
    kinds = {(event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) for event in events}
    assert kinds == {(0, "full_attention", None), (1, "sliding_window", 10)}
    followed.world.close()


# On the wire

def test_a_batch_is_what_vllm_sends() -> None:
    """Every field is in its position, and an older subscriber finds those that it knows."""
    followed = Followed()
    followed.world.ask(prompt(1, 9))
    followed.publish()
    stamp, events, rank = msgspec.msgpack.decode(followed.batches[-1][1])
    assert abs(stamp - time.time()) < 60
    assert rank == 0
    stored = next(event for event in events if event[0] == "BlockStored")
    assert len(stored) == 13
    name, hashes, parent, tokens, size, lora, medium, *rest = stored
    assert rest == [None] * 6
    assert (name, parent, size, lora, medium) == ("BlockStored", None, SIZE, None, "GPU")
    assert tokens[:8] == prompt(1, 9)[:8]
    assert len(tokens) == SIZE * len(hashes)
    assert all(type(each) is int and 0 <= each < 1 << 64 for each in hashes)
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(stored), type=OldBlockStored)
    assert old.token_ids == tokens
    followed.world.kv.reset_prefix_cache()
    followed.publish()
    removed = msgspec.msgpack.decode(followed.batches[-1][1])[1]
    assert removed == [["BlockRemoved", hashes, "GPU", None, None]]
    assert msgspec.msgpack.decode(followed.batches[0][1])[1] == [["AllBlocksCleared"]]
    followed.world.close()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(0, 60), st.integers(-5, 70))
def test_a_replay_has_what_is_kept_from_where_it_was_asked_for(kept: int, batches: int, ask: int) -> None:
    journal = Journal(SIZE, (None,), kept)
    first = journal.sequence + 1
    sent = [journal.append([]) for _ in range(batches)]
    replies = list(journal.replay(first + ask))
    assert journal.sequence < 1 << 53  # which JSON keeps exactly
    assert replies == [each for place, each in enumerate(sent) if place >= max(ask, batches - kept)]


# Over sockets

def addresses(folder: Path) -> dict[str, Any]:
    return {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}


def published(folder: Path, world: World, **options: Any) -> None:
    world.engine.events = start_events(KVEventsConfig(**addresses(folder), **options), world.kv, world.connector)


def joined(folder: Path, hwm: int = 1000) -> Subscriber:
    """A subscriber that knows all there is when it starts."""
    subscriber = Subscriber(**addresses(folder), hwm=hwm)
    subscriber.snapshot()
    return subscriber


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kept", [3, 10_000], ids=["short buffer", "long buffer"])
def test_whatever_is_lost_is_healed(tmp_path: Path, seed: int, kept: int) -> None:
    """Batches are lost at random, and the engine is started again on its disk; in the end the mirror is exact."""
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
            world.close()  # says so
        else:
            world.connector.close(time.monotonic() + 10)  # as after kill -9: nothing is said
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
    for seed in range(20):  # more batches than the first one had sent
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
    world.scheduler.reset_prefix_cache()  # and no step follows
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
    """Nobody waits for it: its queue is full soon, and one that reads is told everything meanwhile."""
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

    start, count = journal.sequence, 300  # of 4 KiB each: more than the buffers of a socket hold
    for number in range(count):
        publish(number)
    assert silent.receive() < journal.sequence - start
    deadline = time.monotonic() + 10
    while not silent.replays:  # by the next batch at the latest it sees that some are missing
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
    """A publisher that is stuck takes nothing, and every request is served all the same."""
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


def test_without_listeners_nothing_is_digested() -> None:
    kv = KVCache(8, SIZE, (None,))
    kv.admit("a", prompt(1, 10))
    assert kv.extend("a", 10)
    kv.commit("a", prompt(1, 10), 10)
    nodes = [kv.tree.home(block)[0] for block in range(1, 9) if kv.pool.cached(block)]
    assert len(nodes) == 2
    assert all(node._digest is None for node in nodes)


# The flag

def test_the_flag_is_vllms() -> None:
    config = EngineConfig.from_flags(kv_events_config={
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558", "topic": "kv@pod@model"})
    assert config.kv_events == KVEventsConfig("tcp://*:5557", "tcp://*:5558", topic="kv@pod@model")
    assert EngineConfig().kv_events is None
    for off in ('{"enable_kv_cache_events": false}', '{"publisher": "zmq"}', "{}",
                '{"enable_kv_cache_events": true, "publisher": "null"}'):
        assert EngineConfig(kv_events_config=off).kv_events is None
    assert EngineConfig(kv_events_config='{"enable_kv_cache_events": true}').kv_events == KVEventsConfig()
    assert KVEventsConfig().endpoint == "tcp://127.0.0.1:5557"  # this machine's alone, unless told
    assert KVEventsConfig().replay_endpoint is None


@pytest.mark.parametrize(("text", "said"), [
    ("nonsense", "is not JSON"),
    ("[]", "is a JSON object"),
    ('{"endpont": "tcp://*:5557"}', "did you mean 'endpoint'"),
    ('{"endpoint": 5557}', "endpoint is a string"),
    ('{"endpoint": "5557"}', "not an address like"),
    ('{"endpoint": "tcp://*:99999"}', "not an address like"),
    ('{"endpoint": "http://*:5557"}', "not an address like"),
    ('{"replay_endpoint": "tcp://10.1.2.3:5558"}', "not an address of this machine"),
    ('{"replay_endpoint": "tcp://127.0.0.1:5557"}', "give each its own port"),
    ('{"publisher": "kafka"}', "zmq or null"),
    ('{"hwm": 0}', "at least 1"),
    ('{"max_queue_size": 7}', "leave it out"),
])
def test_a_bad_flag_is_one_sentence(text: str, said: str) -> None:
    with pytest.raises(SpilloverError, match=said) as error:
        EngineConfig(kv_events_config=text)
    assert "\n" not in str(error.value)


def test_events_need_prefixes() -> None:
    with pytest.raises(SpilloverError, match="needs --enable-prefix-caching"):
        EngineConfig(kv_events_config='{"enable_kv_cache_events": true}', enable_prefix_caching=False)


def test_an_address_that_is_taken_is_one_sentence() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(SpilloverError, match="choose another address"):
            check_addresses(KVEventsConfig(f"tcp://127.0.0.1:{port}"))
    check_addresses(KVEventsConfig(f"tcp://127.0.0.1:{port}"))
    check_addresses(KVEventsConfig("tcp://10.255.255.1:5557"))  # is connected to, not bound
