"""Random lives of a disk tier against a dictionary: what it has, what it dropped, every byte, over many restarts."""

import shutil
import tempfile
import time
from collections import OrderedDict
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from support.disk_calls import PAYLOAD, bytes_under, open_disk, room_for
from support.tier_calls import block_bytes, block_key, close, get, has, put, wait

NUMBERS = st.integers(0, 19)
BATCHES = st.lists(NUMBERS, min_size=1, max_size=7, unique=True)


class DiskMachine(RuleBasedStateMachine):
    """A disk tier and its model. Work that is waited for has one outcome, which the model predicts. Overlapping work
    may evict in several orders: then the model only bounds what may exist, and adopts what does."""

    steps = 0

    @initialize(slots=st.integers(1, 12))
    def build(self, slots: int) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="spillover-test-"))
        self.size = room_for(slots)
        self.epoch = 0  # after clear() the same key has other bytes
        self.model: OrderedDict[int, bytes] = OrderedDict()  # least recently used first
        self.damaged: set[int] = set()
        self.tier = open_disk(self.path, slots)
        self.slots = self.tier.max_blocks()
        assert self.slots == slots

    def payload(self, number: int) -> bytes:
        return block_bytes((self.epoch, number), PAYLOAD)

    @rule(numbers=BATCHES)
    def store(self, numbers: list[int]) -> None:
        expected = []
        new: list[int] = []
        for number in numbers:
            if number in self.model:
                expected.append(True)
                continue
            if len(self.model) + len(new) == self.slots:
                victim = next((old for old in self.model if old not in numbers[: numbers.index(number)]), None)
                if victim is None:
                    expected.append(False)
                    continue
                del self.model[victim]
                self.damaged.discard(victim)
            new.append(number)
            expected.append(True)
        assert put(self.tier, {block_key(n): self.payload(n) for n in numbers}) == expected
        for number, stored in reversed(list(zip(numbers, expected, strict=True))):
            if stored:
                self.model[number] = self.payload(number)
                self.model.move_to_end(number)

    @rule(numbers=BATCHES)
    def load(self, numbers: list[int]) -> None:
        loaded = get(self.tier, [block_key(number) for number in numbers], PAYLOAD)
        assert loaded == [None if n in self.damaged else self.model.get(n) for n in numbers]
        for number in reversed(numbers):
            if number in self.damaged:
                del self.model[number]
                self.damaged.remove(number)
            elif number in self.model:
                self.model.move_to_end(number)

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        expected = min(count, len(self.model))
        assert self.tier.evict(count).result() == expected
        for _ in range(expected):
            self.damaged.discard(self.model.popitem(last=False)[0])

    @rule(number=NUMBERS, bit=st.integers(0, PAYLOAD * 8 - 1))
    def damage(self, number: int, bit: int) -> None:
        if number not in self.damaged:
            assert self.tier.damage(block_key(number), bit) == (number in self.model)
            if number in self.model:
                self.damaged.add(number)

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        self.epoch += 1
        self.model.clear()
        self.damaged.clear()
        self.settle()

    @rule()
    def restart(self) -> None:
        close(self.tier)
        self.tier = open_disk(self.path, capacity_bytes=self.size)
        assert self.tier.max_blocks() == self.slots
        self.take_over()  # a damaged record may have been detected, and an evicted one may be found again

    @rule(slots=st.integers(1, 12))
    def restart_with_another_size(self, slots: int) -> None:
        close(self.tier)
        self.size = room_for(slots)
        self.tier = open_disk(self.path, slots)
        self.slots = self.tier.max_blocks()  # segments of the old size may fit the new one less well
        assert 0 < self.slots <= slots
        self.take_over()

    @rule(data=st.data(), count=st.integers(2, 8))
    def overlap(self, data: st.DataObject, count: int) -> None:
        stores, loads = [], []
        for _ in range(count):
            numbers = data.draw(BATCHES)
            if data.draw(st.booleans()):
                items = [(block_key(n), memoryview(self.payload(n))) for n in numbers]
                stores.extend(self.tier.store(items))
            else:
                buffers = [memoryview(bytearray(PAYLOAD)) for _ in numbers]
                tickets = self.tier.load([(block_key(n), b) for n, b in zip(numbers, buffers, strict=True)])
                loads.extend(zip(numbers, buffers, tickets, strict=True))
            if data.draw(st.integers(0, 3)) == 0:
                data.draw(st.sampled_from(stores or [t for _, _, t in loads])).cancel()
        wait(self.tier, [*stores, *(ticket for _, _, ticket in loads)])
        for number, buffer, ticket in loads:
            assert not ticket.result() or buffer == self.payload(number)
        self.take_over()

    def settle(self) -> None:
        """Wait until the tier is idle, including the erasure of cleared blocks."""
        deadline = time.monotonic() + 30
        while not self.tier.idle():
            assert time.monotonic() < deadline, "work that never ends"
            time.sleep(0.0002)

    def take_over(self) -> None:
        self.settle()
        there = [number for number in range(20) if has(self.tier, [block_key(number)])[0]]
        self.model = OrderedDict()
        self.damaged.clear()
        for number in there:
            (loaded,) = get(self.tier, [block_key(number)], PAYLOAD)
            assert loaded in (None, self.payload(number))
            if loaded is not None:
                self.model[number] = loaded
        self.settle()

    @invariant()
    def what_is_there_is_what_should_be(self) -> None:
        self.tier.check()
        type(self).steps += 1
        there = has(self.tier, [block_key(number) for number in range(20)])
        assert there == [number in self.model for number in range(20)]
        assert self.tier.stats().blocks == len(self.model) <= self.slots
        assert bytes_under(self.path) <= self.size

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            close(self.tier)
            shutil.rmtree(self.path)


def test_disk_is_a_dictionary_with_bounds() -> None:
    run_state_machine_as_test(
        DiskMachine,
        settings=settings(
            max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    assert DiskMachine.steps > 1000
