"""Random lives of many sequences: the blocks of each table hold exactly that sequence's KV, and no block leaks.

The model keeps fake KV: for each slot of each block, the group that wrote it and the whole prefix it was computed from.
Real KV depends on exactly that, so a block reused too early, shared across salts or kept past a reset is detected.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from spillover.memory.kv.blocks import FREE, IN_FLIGHT, READY
from spillover.memory.kv.kv_cache import KVCache

# Few tokens and shared openings, so that prefixes coincide often.
OPENINGS = ([0] * 48, [0] * 20 + [1] * 28, [1, 0] * 24)
PROMPTS = st.builds(
    lambda opening, shared, tail: opening[:shared] + tail,
    st.sampled_from(OPENINGS),
    st.sampled_from([0, 16, 31, 32, 33, 48]),
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
)
SALTS = (None, None, None, "", "tenant")


@dataclass
class Model:
    """The test's model of a live sequence."""

    tokens: list[int]
    salt: str | None
    epoch: int  # number of resets before it was admitted
    computed: int  # committed tokens
    written: int  # tokens whose KV is stored; above `computed` between a launch and its commit
    loading: set[int] = field(default_factory=set)  # its unfinished blocks that a copy is filling


class CacheMachine(RuleBasedStateMachine):
    windows: tuple[int | None, ...] = (None,)
    steps = 0

    @initialize(
        block_size=st.sampled_from([4, 8, 16]),
        blocks_per_group=st.integers(4, 20),
        prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def build(self, block_size: int, blocks_per_group: int, prefix_caching: bool) -> None:
        self.size = block_size
        self.caching = prefix_caching
        self.cache = KVCache(blocks_per_group * len(self.windows), block_size, self.windows, prefix_caching)
        self.live: dict[str, Model] = {}
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}  # (block, slot) -> (group, prefix)
        self.prefixes: dict[tuple[object, int], int] = {}  # (state before the token, token) -> prefix
        self.in_flight: dict[int, list[tuple[int, int] | None]] = {}  # block -> its content when the copy began
        self.offered: set[int] = set()  # prefixes of whole blocks committed since the last reset
        self.epoch = 0
        self.names = 0

    def prefix_ids(self, model: Model) -> list[int]:
        """Return one id per position; two positions have equal ids exactly if they follow the same tokens and salt."""
        before: object = (model.salt, model.epoch)
        ids = []
        for token in model.tokens:
            before = self.prefixes.setdefault((before, token), len(self.prefixes))
            ids.append(before)
        return ids

    def pick(self, data: st.DataObject) -> tuple[str, Model]:
        name = data.draw(st.sampled_from(sorted(self.live)))
        return name, self.live[name]

    def content(self, block: int) -> list[tuple[int, int] | None]:
        return [self.slots.get((block, slot)) for slot in range(self.size)]

    @rule(prompt=PROMPTS, salt=st.sampled_from(SALTS))
    def admit(self, prompt: list[int], salt: str | None) -> None:
        self.start(prompt, salt)

    @rule(prompt=PROMPTS, salt=st.sampled_from(SALTS), chunk=st.integers(1, 64), copies=st.integers(1, 3))
    def prefill(self, prompt: list[int], salt: str | None, chunk: int, copies: int) -> None:
        """Compute prompts in chunks, concurrently; two copies compute the same blocks, as both were admitted first."""
        names = [self.start(prompt, salt) for _ in range(copies)]
        while names:
            for name in list(names):
                model = self.live.get(name)  # None if it was preempted for another
                if model is None or model.computed == len(prompt):
                    names.remove(name)
                elif self.step_at_any_cost(name, min(model.computed + chunk, len(prompt))):
                    self.commit_to(name, model.written)
                else:
                    names.remove(name)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def decode(self, tokens: list[int]) -> None:
        """Every sequence without uncomputed tokens takes a few steps of one token each."""
        for token in tokens:
            for name in list(self.live):
                model = self.live.get(name)
                if model is not None and model.computed == len(model.tokens) and not model.loading:
                    model.tokens.append(token)
                    if self.step_at_any_cost(name, len(model.tokens)):
                        self.commit_to(name, model.written)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=40))
    def launch(self, data: st.DataObject, tokens: list[int]) -> None:
        """Launch a step without committing it: another may be launched next, or the sequence may be released first."""
        name, model = self.pick(data)
        if not model.loading:
            end = model.written + len(tokens)
            model.tokens.extend(tokens[: max(0, end - len(model.tokens))])
            self.step(name, end)

    @precondition(lambda self: any(m.written > m.computed and not m.loading for m in self.live.values()))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        ahead = sorted(n for n, m in self.live.items() if m.written > m.computed and not m.loading)
        name = data.draw(st.sampled_from(ahead))
        model = self.live[name]
        self.commit_to(name, data.draw(st.integers(model.computed + 1, model.written)))

    def start(self, tokens: list[int], salt: str | None) -> str:
        name = f"s{self.names}"
        self.names += 1
        model = Model(list(tokens), salt, self.epoch, 0, 0)
        expected = self.cache.match(tokens, salt)
        covered = self.cache.admit(name, tokens, salt)
        assert covered == expected
        assert covered % self.size == 0
        assert covered < len(tokens)
        model.computed = model.written = covered
        self.live[name] = model
        if self.caching and self.cache.stats.evictions == 0:
            # Without evictions, everything committed since the reset is found.
            ids = self.prefix_ids(model)[: len(tokens) - 1]
            ends = range(self.size, len(ids) + 1, self.size)
            assert covered == max((end for end in ends if ids[end - 1] in self.offered), default=0)
        return name

    def step(self, name: str, end: int) -> bool:
        """Allocate blocks up to `end`, then write KV into them as a forward pass would."""
        model = self.live[name]
        needed = self.cache.blocks_needed(name, end)
        free, before = self.cache.num_free, [list(self.cache.table(name, g)) for g in range(len(self.windows))]
        if not self.cache.extend(name, end):
            assert needed > free or self.in_flight, "free and evictable blocks were refused"
            assert before == [self.cache.table(name, g) for g in range(len(self.windows))]
            return False
        assert needed <= free
        ids = self.prefix_ids(model)
        for group, window in enumerate(self.windows):
            table = self.cache.table(name, group)
            for position in range(model.written, end):
                self.slots[table[position // self.size], position % self.size] = (group, ids[position])
            # The first query of the chunk sees its whole window.
            oldest = 0 if window is None else max(0, model.written - window + 1)
            for position in range(oldest, end):
                block = table[position // self.size]
                assert block != 0
                assert self.slots[block, position % self.size] == (group, ids[position])
        model.written = end
        return True

    def step_at_any_cost(self, name: str, end: int) -> bool:
        """Step like a scheduler: release the oldest other sequences until there is room."""
        while not self.step(name, end):
            others = [other for other in self.live if other != name]
            if not others:
                return False
            self.cache.release(others[0])
            del self.live[others[0]]
        return True

    def commit_to(self, name: str, end: int) -> None:
        model = self.live[name]
        self.cache.commit(name, model.tokens, end)
        if self.caching and model.epoch == self.epoch:
            ids = self.prefix_ids(model)
            self.offered.update(ids[e - 1] for e in range(self.size, end + 1, self.size))
        model.computed = end

    @precondition(lambda self: self.live)
    @rule(data=st.data(), back=st.integers(0, 40))
    def fork(self, data: st.DataObject, back: int) -> None:
        name, parent = self.pick(data)
        child = f"s{self.names}"
        self.names += 1
        tokens = parent.tokens[: max(1, len(parent.tokens) - back)]
        covered = self.cache.fork(name, child, len(tokens))
        assert covered % self.size == 0
        assert covered <= min(len(tokens), parent.computed)
        if all(window is None for window in self.windows):
            assert covered == min(len(tokens), parent.computed) // self.size * self.size
        self.live[child] = Model(tokens, parent.salt, parent.epoch, covered, covered)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=40))
    def branch(self, data: st.DataObject, tokens: list[int]) -> None:
        """A fork computes other tokens after the committed ones, and its blocks replace those of its sequence."""
        name, parent = self.pick(data)
        if parent.loading:
            return
        fork, ready = f"{name}/branch", parent.computed // self.size * self.size
        covered = self.cache.fork(name, fork, parent.computed)
        self.live[fork] = Model(parent.tokens[:parent.computed] + tokens, parent.salt, parent.epoch, covered, covered)
        if covered == ready and self.step(fork, parent.computed + len(tokens)):
            self.cache.adopt(name, fork)
            self.live[name] = self.live[fork]
        else:
            self.cache.release(fork)
        del self.live[fork]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """Finish or abort a sequence in any state: in prefill, launched and not committed, or loading."""
        name, _ = self.pick(data)
        self.cache.release(name)
        del self.live[name]
        with pytest.raises(KeyError):
            self.cache.release(name)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        name, model = self.pick(data)
        self.cache.release(name)
        del self.live[name]
        self.start(list(model.tokens), model.salt)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        """Copy a complete block, held or evictable, to another tier."""
        pool = self.cache.pool
        complete = [b for b in range(1, pool.num_blocks + 1) if pool.state(b) is READY or pool.cached(b)]
        complete = [b for b in complete if b not in self.in_flight]
        if complete:
            block = data.draw(st.sampled_from(complete))
            self.cache.begin_copy([block])
            self.in_flight[block] = self.content(block)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        """Fill a block that its sequence has not finished by a copy from another tier."""
        name, model = self.pick(data)
        unfinished = [b for b in self.cache.table(name)[model.computed // self.size :] if b not in self.in_flight]
        if unfinished:
            block = data.draw(st.sampled_from(unfinished))
            self.cache.begin_copy([block])
            self.in_flight[block] = self.content(block)
            model.loading.add(block)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        self.end_copy(data.draw(st.sampled_from(sorted(self.in_flight))))

    def end_copy(self, block: int) -> None:
        assert self.content(block) == self.in_flight.pop(block), "a block was reused while a copy held it"
        self.cache.end_copy([block])
        for model in self.live.values():
            model.loading.discard(block)

    @rule(really=st.integers(0, 4))
    def reset(self, really: int) -> None:
        if really == 0:
            self.cache.reset_prefix_cache()
            self.offered.clear()
            self.epoch += 1
            assert self.cache.stats.evictable == 0
            assert self.cache.stats.tree_nodes == 0

    @invariant()
    def tables_hold_what_they_should(self) -> None:
        type(self).steps += 1
        self.cache.check()
        for block in self.in_flight:
            assert self.cache.pool.state(block) is IN_FLIGHT
        for name, model in self.live.items():
            ids = self.prefix_ids(model)
            for group, window in enumerate(self.windows):
                table = self.cache.table(name, group)
                seen = 0 if window is None else max(0, model.computed - window + 1)
                for i, block in enumerate(table):
                    assert (block == 0) == ((i + 1) * self.size <= seen), f"{name}, group {group}, entry {i}"
                    if block == 0:
                        continue
                    assert self.cache.pool.state(block) is not FREE
                    for position in range(i * self.size, min((i + 1) * self.size, model.written)):
                        assert self.slots[block, position % self.size] == (group, ids[position])

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for name in list(self.live):
            self.cache.release(name)
        self.cache.check()
        self.live.clear()
        for block in list(self.in_flight):
            self.end_copy(block)
        self.cache.check()
        stats = self.cache.stats
        assert stats.free + stats.evictable == stats.total
        self.cache.reset_prefix_cache()
        self.cache.check()
        assert self.cache.stats.free == stats.total


@pytest.mark.parametrize("windows", [(None,), (None, 32), (24,), (None, 16, 16)], ids=str)
def test_random_lives_of_sequences_never_mix_or_leak_blocks(windows: tuple[int | None, ...]) -> None:
    class Machine(CacheMachine):
        steps = 0

    Machine.windows = windows
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=50,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert Machine.steps > 800, f"only {Machine.steps} steps were taken"
