"""KV events: a subscriber knows the contents of every tier, even after losses; and the engine never waits for one."""

from __future__ import annotations

import random
import time
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
from spillover.engine.events.log import KVEventLog, Record
from spillover.engine.events.publisher import check_addresses
from spillover.errors import SpilloverError
from spillover.memory.kv.digest import prefix_keys, root_digest
from spillover.memory.kv.event_wire import block_hash
from spillover.memory.kv.kv_cache import KVCache
from support.events.event_worlds import PLACES, options_of, requests, truth
from support.events.kv_mirror import BlockStored, KVEventBatch, LesserBlockStored, Mirror
from support.tiered_world import SIZE, World, prompt


class Followed:
    """A simulated engine and its mirror, without sockets: records go through the journal to the mirror."""

    def __init__(self, **options: Any) -> None:
        self.world = World(**options)
        self.log = KVEventLog(self.world.kv.tree)
        self.world.connector.publish_to(self.log)
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


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("windows", [(None,), (None, 10), (6,)], ids=["full", "hybrid", "window"])
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30))
def test_a_mirror_holds_what_the_tiers_hold(tmp_path_factory: pytest.TempPathFactory, place: str,
                                            windows: tuple[int | None, ...], seed: int) -> None:
    """The mirror is exact after every step, also during copies, aborts and resets, and after a restart."""
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("disk")
    for _ in range(2):  # the second time with the blocks that the first left on its disks
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
    # A block keeps its hash and its tokens when it moves to a lower tier.
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
        followed.world.ask(prompt(seed, 60), salt="tenant-a-secret")  # some blocks go to host memory
    followed.check()
    sent = b"".join(batch for _, batch in (*followed.batches, *followed.journal.snapshot()))
    assert b"secret" not in sent
    assert b"tenant" not in sent
    hashes = [{block_hash(key[:-1]) for key in prefix_keys(asked, SIZE, root_digest(b"", salt))} for salt in salts]
    assert not hashes[0] & hashes[1]
    assert not hashes[1] & hashes[2]
    # A router that knows a request's salt recognises the first blocks for that salt; those of other salts stay opaque.
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


# Wire format

def test_a_batch_is_what_vllm_sends() -> None:
    """Every field has vLLM's name, and a subscriber that knows fewer fields finds those it knows."""
    followed = Followed()
    followed.world.ask(prompt(1, 9))
    followed.publish()
    stamp, events, rank = msgspec.msgpack.decode(followed.batches[-1][1])
    assert abs(stamp - time.time()) < 60
    assert rank == 0
    stored = next(event for event in events if event["type"] == "BlockStored")
    hashes, tokens = stored["block_hashes"], stored["token_ids"]
    assert stored == {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": tokens,
                      "block_size": SIZE, "lora_id": None, "medium": "GPU", "lora_name": None}
    assert tokens[:8] == prompt(1, 9)[:8]
    assert len(tokens) == SIZE * len(hashes)
    assert all(type(each) is int and 0 <= each < 1 << 64 for each in hashes)
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(stored), type=LesserBlockStored)
    assert old.token_ids == tokens
    followed.world.kv.reset_prefix_cache()
    followed.publish()
    removed = msgspec.msgpack.decode(followed.batches[-1][1])[1]
    assert removed == [{"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}]
    assert msgspec.msgpack.decode(followed.batches[0][1])[1] == [{"type": "AllBlocksCleared"}]
    followed.world.close()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(0, 60), st.integers(-5, 70))
def test_a_replay_has_what_is_kept_from_where_it_was_asked_for(kept: int, batches: int, ask: int) -> None:
    journal = Journal(SIZE, (None,), kept)
    first = journal.sequence + 1
    sent = [journal.append([]) for _ in range(batches)]
    replies = list(journal.replay(first + ask))
    assert journal.sequence < 1 << 53  # JSON represents such numbers exactly
    assert replies == [each for place, each in enumerate(sent) if place >= max(ask, batches - kept)]

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
    assert KVEventsConfig().endpoint == "tcp://127.0.0.1:5557"  # only this machine, unless configured
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
    check_addresses(KVEventsConfig("tcp://10.255.255.1:5557"))  # a remote address is connected to, not bound
