"""The router's index of replicas' blocks: equal to their content whenever it is called exact, whatever is lost."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.cluster.index import PrefixIndex
from spillover.cluster.mirror import Approximation, IndexState, Mirror
from spillover.engine.events.journal import Journal
from spillover.engine.events.log import Record, Removed, Stored
from spillover.memory.kv.digest import block_digest, packed, root_digest
from spillover.memory.kv.event_wire import (
    CPU,
    GPU,
    MEDIA,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    block_hash,
)

ROOT = root_digest(b"", None)


def indexed() -> PrefixIndex:
    index = PrefixIndex()
    for replica in range(3):
        index.add(replica)
    return index


# The index


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_prompt_is_matched_as_far_as_each_replica_goes(data: st.DataObject) -> None:
    """Replicas hold prefixes of prompts, on the device, then in host memory, on disk, and in flight; each is found."""
    index, keys = indexed(), list(range(1, 61))
    parts = {replica: data.draw(st.lists(st.integers(0, 25), min_size=4, max_size=4)) for replica in range(3)}
    for replica, lengths in parts.items():
        start = 0
        for medium, length in zip((*MEDIA, None), lengths, strict=True):
            held = keys[start:start + length]
            if medium is None:
                index.expect(replica, held)
            else:
                index.store(replica, medium, held)
            start += length
    asked = data.draw(st.integers(0, 60))
    for replica, match in index.match(keys[:asked], range(3)).items():
        left, expected = asked, []
        for length in parts[replica]:
            expected.append(min(length, left))
            left -= expected[-1]
        assert [match.device, match.host, match.storage, match.expected] == expected


@given(st.lists(st.tuples(st.sampled_from(["store", "remove", "expect", "unexpect", "clear"]), st.integers(0, 2),
                          st.sampled_from(MEDIA), st.integers(1, 12)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_the_index_holds_what_was_stored_and_not_removed(steps: list[tuple[str, int, str, int]]) -> None:
    index, held, expected = indexed(), set[tuple[int, str, int]](), list[tuple[int, int]]()
    for what, replica, medium, key in steps:
        if what == "store":
            index.store(replica, medium, [key])
            held.add((replica, medium, key))
        elif what == "remove":
            index.remove(replica, medium, [key])
            held.discard((replica, medium, key))
        elif what == "clear":
            index.clear(replica)
            held = {each for each in held if each[0] != replica}
        elif what == "expect":
            index.expect(replica, [key])
            expected.append((replica, key))
        elif (replica, key) in expected:
            index.unexpect(replica, [key])
            expected.remove((replica, key))
    for key in range(1, 13):
        for replica, match in index.match([key], range(3)).items():
            nearest = next((medium for medium in MEDIA if (replica, medium, key) in held), None)
            assert (match.device, match.host, match.storage) == tuple(int(nearest == medium) for medium in MEDIA)
            assert match.expected == int(nearest is None and (replica, key) in expected)


# Events of this engine


class Publisher:
    """A journal of blocks of random prompts that are stored and removed, like an engine's."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.restart()

    def restart(self) -> tuple[int, bytes]:
        self.journal = Journal(4, [None], 8)
        self.held: dict[tuple[str, bytes], None] = {}
        return self._numbered(self.journal.append([], cleared=True))

    def step(self) -> tuple[int, bytes]:
        records: list[Record] = []
        for _ in range(self.random.randint(1, 5)):
            if self.held and self.random.random() < 0.4:
                medium, digest = self.random.choice(list(self.held))
                del self.held[medium, digest]
                records.append(Removed(medium, digest, 0))
            else:
                medium, digest = self.random.choice(MEDIA), bytes(self.random.randbytes(32))
                self.held[medium, digest] = None
                records.append(Stored(medium, digest, 0))
        return self._numbered(self.journal.append(records))

    def _numbered(self, batch: tuple[bytes, bytes]) -> tuple[int, bytes]:
        return int.from_bytes(batch[0], "big"), batch[1]

    def snapshot(self) -> list[tuple[int, bytes]]:
        return [self._numbered(each) for each in self.journal.snapshot()]


def known(index: PrefixIndex, replica: int) -> dict[str, frozenset[int]]:
    return {medium: index.keys(replica, medium) for medium in MEDIA}


@given(seed=st.integers(0, 10**6), fates=st.lists(st.sampled_from(["arrives", "arrives", "arrives", "lost", "restart"]),
                                                 max_size=50))
@settings(max_examples=40, deadline=None)
def test_what_is_called_exact_is_exact(seed: int, fates: list[str]) -> None:
    """If batches are lost or engines killed, the gap is detected at once, a dead engine's blocks leave the index, and a
    snapshot completes it."""
    publisher, index = Publisher(seed), indexed()
    index.store(0, GPU, [1, 2, 3])  # blocks of another replica are unaffected
    mirror = Mirror(index, 1)
    for fate in fates:
        sequence, payload = publisher.step() if fate != "restart" else publisher.restart()
        if fate == "lost":
            continue
        if not mirror.apply_batch(sequence, payload):
            assert mirror.state is IndexState.DEGRADED
            replies = publisher.snapshot()
            mirror.restore(replies[-1][0], [each for _, each in replies])
        assert mirror.state is IndexState.EXACT
        held = {medium: frozenset(block_hash(digest) for place, digest in publisher.held if place == medium)
                for medium in MEDIA}
        assert known(index, 1) == held
    assert index.keys(0, GPU) == {1, 2, 3}


def test_a_replica_that_is_gone_holds_nothing() -> None:
    publisher, index = Publisher(1), indexed()
    mirror = Mirror(index, 1)
    replies = publisher.snapshot()
    mirror.restore(replies[-1][0], [each for _, each in replies])
    for _ in range(5):
        assert mirror.apply_batch(*publisher.step())
    mirror.reset()
    assert not any(known(index, 1).values())
    assert mirror.state is IndexState.DEGRADED
    assert not mirror.apply_batch(*publisher.step())  # no later batch is a continuation


# Events of other engines, whose block hashes are arbitrary: keys are computed from tokens and parents


def foreign(prompt: Sequence[int], start: int, name: int, size: int = 4) -> BlockStored:
    """Return an event for the blocks of a prompt from `start` on, named by arbitrary numbers."""
    count = len(prompt) // size - start
    names = [name + start + place for place in range(count)]
    return BlockStored(names, name + start - 1 if start else None, list(prompt[start * size:]), size, None, GPU,
                       None)


def batch(*events: object) -> bytes:
    return msgspec.msgpack.encode(EventBatch(time.time(), list(events)))


def keys_of(prompt: Sequence[int], size: int = 4) -> set[int]:
    digest, keys = ROOT, set()
    for start in range(0, len(prompt) - size + 1, size):
        digest = block_digest(digest, packed(list(prompt[start:start + size])))
        keys.add(block_hash(digest))
    return keys


@given(seed=st.integers(0, 10**6), cut=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_children_of_unknown_parents_are_kept_until_the_parents_are_known(seed: int, cut: int) -> None:
    """Unlike in other routers, which drop them for good after a restart, such children are kept."""
    draw, index = random.Random(seed), indexed()
    mirror = Mirror(index, 0, root=ROOT)
    prompt = [draw.randrange(50_000) for _ in range(24)]
    mirror.begin_partial(6)
    assert mirror.apply_batch(7, batch(foreign(prompt, cut, 1000)))
    assert not index.keys(0, GPU)
    assert mirror.state is IndexState.DEGRADED  # the index is not complete
    assert mirror.apply_batch(8, batch(foreign(prompt[:cut * 4], 0, 1000)))
    assert index.keys(0, GPU) == keys_of(prompt)
    assert mirror.apply_batch(9, batch(BlockRemoved([1000 + cut], GPU)))
    assert len(index.keys(0, GPU)) == 5


def test_a_replay_from_the_beginning_is_exact_and_one_from_later_is_not() -> None:
    index, prompts = indexed(), [[draw.randrange(99) for _ in range(16)] for draw in map(random.Random, range(6))]
    payloads = [(number, batch(foreign(prompt, 0, 100 * number))) for number, prompt in enumerate(prompts)]
    mirror = Mirror(index, 0, root=ROOT)
    assert mirror.replay(payloads, whole=True)
    assert mirror.state is IndexState.EXACT
    assert index.keys(0, GPU) == set().union(*map(keys_of, prompts))
    late = Mirror(index, 1, root=ROOT)
    assert not late.apply_batch(*payloads[3])
    late.begin_partial(2)
    assert late.apply_batch(*payloads[3])
    assert late.state is IndexState.DEGRADED


def test_names_that_are_forgotten_take_no_memory_and_a_second_medium_counts() -> None:
    index = indexed()
    mirror = Mirror(index, 0, root=ROOT)
    mirror.replay([(0, batch(foreign(range(16), 0, 10)))], whole=True)
    stored = BlockStored([10, 11], None, [], 4, None, CPU, None)
    assert mirror.apply_batch(1, batch(stored, BlockRemoved([10, 11, 12, 13], GPU)))
    assert not index.keys(0, GPU)
    assert len(index.keys(0, CPU)) == 2
    assert mirror.apply_batch(2, batch(BlockRemoved([10, 11], CPU), AllBlocksCleared()))
    assert not any(known(index, 0).values())


def test_blocks_that_depend_on_more_than_tokens_are_left_out() -> None:
    index = indexed()
    mirror = Mirror(index, 0, root=ROOT)
    event = foreign(range(16), 0, 10)
    event.extra_keys = [("salt",), None, None, None]
    mirror.replay([(0, batch(event))], whole=True)
    assert not index.keys(0, GPU)


# Guessing


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), max_size=60), st.integers(4, 40))
@settings(max_examples=40, deadline=None)
def test_guesses_stay_within_the_room_and_keep_what_was_used_last(prompts: list[tuple[int, int]], room: int) -> None:
    index = indexed()
    guess = Approximation(index, 0, room)
    for tenant, length in prompts:
        keys = list(range(100 * tenant, 100 * tenant + length))
        guess.computed(keys)
        assert len(index.keys(0, GPU)) <= room
        assert set(keys[:room]) <= index.keys(0, GPU)
    guess.answered(found=False)
    assert guess.capacity >= 256 or guess.capacity <= room
    assert guess.state is IndexState.FALLBACK
    guess.reset()
    assert not index.keys(0, GPU)
