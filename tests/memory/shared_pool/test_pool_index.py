"""The pool's index against a plain model: never over budget, no slot used twice, no leak when a client leaves."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spillover.errors import SpilloverError
from spillover.memory.shared_pool.index import FULL, PAGE, PRESENT, Client, PoolIndex, slab_size

SLAB = 4 * PAGE
SLABS = 4
PAYLOADS = (100, PAGE, PAGE + 1, 3 * PAGE, SLAB)  # of the models a, b, c, d, e: some share a slot size
KEYS = st.lists(st.integers(0, 11).map(lambda number: bytes([number])), min_size=1, max_size=5, unique=True)
WHO = st.integers(0, 5)


class Books(RuleBasedStateMachine):
    """Random calls. `written` is the content of each place as clients know it: (model, key, checksum)."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0
        self.index = PoolIndex(SLABS * SLAB, SLAB, clock=lambda: self.time)
        self.clients: list[Client] = []
        self.leased: dict[int, list[tuple[int, bytes]]] = {}  # by client: (place, key)
        self.pinned: dict[int, list[tuple[int, int]]] = {}  # by client: (place, checksum), once per pin
        self.memory: dict[int, tuple[bytes, bytes, int]] = {}  # place -> what was last written there
        self.sums = 0

    def _one(self, who: int) -> Client:
        return self.clients[who % len(self.clients)]

    def _extent(self, client: Client, place: int) -> range:
        return range(place, place + client.model.payload_bytes)

    @rule(model=st.integers(0, len(PAYLOADS) - 1))
    def join(self, model: int) -> None:
        if len(self.clients) < 6:
            client = self.index.join(bytes([model]), PAYLOADS[model], {})
            self.clients.append(client)
            self.leased[id(client)], self.pinned[id(client)] = [], []

    @precondition(lambda self: self.clients)
    @rule(who=WHO, keys=KEYS)
    def take(self, who: int, keys: list[bytes]) -> None:
        client = self._one(who)
        known = {key for _, key in (lease for other in self.clients if other.model is client.model
                                    for lease in self.leased[id(other)])}
        for key, place in zip(keys, self.index.take(client, keys), strict=True):
            if place == PRESENT:
                assert key in known or self.index.find(client, [key]) == [True]
            elif place != FULL:
                assert place + PAYLOADS[client.model.identity[0]] <= SLABS * SLAB
                self.leased[id(client)].append((place, key))

    @precondition(lambda self: self.clients)
    @rule(who=WHO, count=st.integers(1, 5))
    def publish(self, who: int, count: int) -> None:
        client = self._one(who)
        mine = self.leased[id(client)]
        chosen, self.leased[id(client)] = mine[:count], mine[count:]
        sums = []
        for place, key in chosen:
            self.sums += 1
            sums.append(self.sums)
            self.memory[place] = (client.model.identity, key, self.sums)
        self.index.publish(client, [place for place, _ in chosen], sums)
        assert self.index.publish(client, [place for place, _ in chosen], sums) == [False] * len(chosen)

    @precondition(lambda self: self.clients)
    @rule(who=WHO, keys=KEYS)
    def pin(self, who: int, keys: list[bytes]) -> None:
        client = self._one(who)
        found = self.index.find(client, keys)
        for key, there, pinned in zip(keys, found, self.index.pin(client, keys), strict=True):
            assert there == (pinned is not None)
            if pinned is not None:
                assert self.memory[pinned[0]] == (client.model.identity, key, pinned[1])
                self.pinned[id(client)].append(pinned)

    @precondition(lambda self: self.clients)
    @rule(who=WHO, count=st.integers(1, 5))
    def release(self, who: int, count: int) -> None:
        client = self._one(who)
        mine = self.pinned[id(client)]
        chosen, self.pinned[id(client)] = mine[:count], mine[count:]
        for place, checksum in chosen:
            assert self.memory[place][2] == checksum, "a block was overwritten while it was read"
        self.index.release(client, [place for place, _ in chosen])

    @precondition(lambda self: self.clients)
    @rule(who=WHO, keys=KEYS)
    def drop(self, who: int, keys: list[bytes]) -> None:
        client = self._one(who)
        there = self.index.find(client, keys)
        assert self.index.drop(client, keys) == sum(there)
        assert self.index.find(client, keys) == [False] * len(keys)

    @precondition(lambda self: self.clients)
    @rule(who=WHO, every=st.booleans(), count=st.integers(1, 4))
    def forget(self, who: int, every: bool, count: int) -> None:
        client = self._one(who)
        if every:
            self.index.clear(client.model)
            assert not client.model.blocks
        else:
            before = len(client.model.blocks)
            gone = self.index.evict(count, client.model)
            assert len(client.model.blocks) == before - gone

    @precondition(lambda self: self.clients)
    @rule(who=WHO)
    def leave(self, who: int) -> None:
        client = self.clients.pop(who % len(self.clients))
        self.index.leave(client)
        del self.leased[id(client)], self.pinned[id(client)]

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.time += seconds

    @invariant()
    def books_balance(self) -> None:
        self.index.check()
        assert self.index.used_bytes <= self.index.prepared_bytes <= SLABS * SLAB
        held: list[range] = []
        for client in self.clients:
            held += [self._extent(client, place) for place, _ in self.leased[id(client)]]
        held += [self._extent(client, place) for client in self.clients
                 for place in {place for place, _ in self.pinned[id(client)]}
                 if not any(place in {other for other, _ in self.pinned[id(before)]}
                            for before in self.clients[: self.clients.index(client)])]
        held.sort(key=lambda extent: extent.start)
        assert all(one.stop <= other.start for one, other in itertools.pairwise(held)), "a slot twice"

    def teardown(self) -> None:
        for client in self.clients:
            self.index.leave(client)
        self.index.check()
        assert all(not slab.busy for slab in self.index.slabs())
        for model in list(self.index.models.values()):
            self.index.clear(model)
        assert self.index.used_bytes == 0
        assert not self.index.models


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=60, deadline=None,
                              suppress_health_check=[HealthCheck.too_slow])


def stored(index: PoolIndex, client: Client, keys: list[bytes]) -> list[int]:
    places = index.take(client, keys)
    index.publish(client, [place for place in places if place >= 0], [7] * sum(place >= 0 for place in places))
    return places


def named(first: int, count: int) -> list[bytes]:
    return [number.to_bytes(2, "big") for number in range(first, first + count)]


def test_least_recently_used_goes_first() -> None:
    index = PoolIndex(2 * SLAB, SLAB)
    client = index.join(b"a", PAGE, {})
    stored(index, client, named(0, 8))
    assert index.find(client, named(4, 2)) == [True, True]
    stored(index, client, named(100, 2))
    # Of the blocks unused since, those at the end are evicted first.
    assert [number for number in range(8) if index.find(client, named(number, 1)) == [False]] == [6, 7]


def test_an_unused_model_gives_its_slabs_to_another_size() -> None:
    index = PoolIndex(4 * SLAB, SLAB)
    old, new = index.join(b"old", PAGE, {}), index.join(b"new", 2 * PAGE, {})
    stored(index, old, named(0, 16))
    for first in range(0, 32, 2):
        stored(index, new, named(first, 2))
        index.check()
    assert len(old.model.blocks) <= 4
    assert len(new.model.blocks) >= 6
    # The other way round.
    for first in range(100, 140, 4):
        stored(index, old, named(first, 4))
        index.check()
    assert len(old.model.blocks) >= 12


def test_two_models_in_use_share() -> None:
    index = PoolIndex(16 * SLAB, SLAB)
    one, two = index.join(b"one", PAGE, {}), index.join(b"two", 2 * PAGE, {})
    stored(index, one, named(0, 64))
    for turn in range(100):
        stored(index, one, named(1000 + 4 * turn, 4))
        stored(index, two, named(2 * turn, 2))
    slabs = [sum(slab.size.stride == stride for slab in index.slabs()) for stride in (PAGE, 2 * PAGE)]
    assert sum(slabs) == 16
    assert min(slabs) >= 4, slabs


def test_a_full_pool_refuses_and_recovers() -> None:
    index = PoolIndex(SLAB, SLAB)
    writer, other = index.join(b"a", PAGE, {}), index.join(b"b", SLAB, {})
    places = index.take(writer, named(0, 6))
    assert places[4:] == [FULL, FULL]
    assert index.take(other, [b"x"]) == [FULL]
    index.leave(writer)
    assert index.take(other, [b"x"]) == [0]


def test_a_block_that_another_client_writes_is_there() -> None:
    index = PoolIndex(SLAB, SLAB)
    one, two = index.join(b"a", PAGE, {}), index.join(b"a", PAGE, {})
    assert index.take(one, [b"x"]) == [0]
    assert index.take(two, [b"x"]) == [PRESENT]
    assert index.find(two, [b"x"]) == [False]
    index.leave(one)
    assert index.take(two, [b"x"]) != [PRESENT]


def test_what_cannot_be_prepared_makes_the_pool_smaller() -> None:
    index = PoolIndex(8 * SLAB, SLAB, prepare=lambda number: number < 3)
    client = index.join(b"a", PAGE, {})
    stored(index, client, named(0, 40))
    assert index.capacity == 3 * SLAB
    assert len(client.model.blocks) == 12
    index.check()


def test_refusals() -> None:
    with pytest.raises(SpilloverError, match="holds nothing"):
        PoolIndex(100)
    index = PoolIndex(64 * PAGE)
    with pytest.raises(SpilloverError, match="cannot hold KV blocks of"):
        index.join(b"a", 64 * PAGE, {})
    index.join(b"a", PAGE, {})
    with pytest.raises(SpilloverError, match="not 17"):
        index.join(b"a", 17, {})


@pytest.mark.parametrize("capacity", [16 * PAGE, 10**6, 10**8, 8 * 10**9, 10**12])
def test_slabs_are_neither_few_nor_very_many(capacity: int) -> None:
    assert 16 <= capacity // slab_size(capacity) <= 2 * 2048
