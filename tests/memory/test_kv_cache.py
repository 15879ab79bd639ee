"""The promises of the KV cache to the scheduler, one per test."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.errors import SpilloverError
from spillover.memory.kv.blocks import FREE
from spillover.memory.kv.digest import prefix_keys, root_digest
from spillover.memory.kv.kv_cache import KVCache
from spillover.memory.policies import LRU


def run(cache: KVCache, seq: str, tokens: list[int], salt: str | None = None, chunk: int = 10_000) -> int:
    """Admit and compute a whole prompt; return the number of tokens found."""
    computed = covered = cache.admit(seq, tokens, salt)
    while computed < len(tokens):
        computed = min(computed + chunk, len(tokens))
        assert cache.extend(seq, computed)
        cache.commit(seq, tokens, computed)
    cache.check()
    return covered


def test_two_identical_prompts_in_one_batch_never_share_or_lose_a_page() -> None:
    cache = KVCache(8, 4, [None])
    tokens = list(range(9))
    for seq in "ab":
        assert cache.admit(seq, tokens) == 0
        assert cache.extend(seq, 9)
    for seq in "ab":
        cache.commit(seq, tokens, 9)
        cache.check()
    first, second = list(cache.table("a")), list(cache.table("b"))
    assert not set(first) & set(second)
    cache.release("a")
    # The duplicate's blocks stay with b: a new sequence gets none of them.
    assert cache.admit("c", [7] * 8) == 0
    assert cache.extend("c", 4)
    assert cache.table("b") == second
    assert not set(cache.table("c")) & set(second)
    cache.release("b")
    cache.release("c")
    cache.check()
    assert (cache.stats.free, cache.stats.evictable) == (6, 2)  # one copy of the two full blocks is kept


def test_what_follows_a_duplicate_is_cached_too() -> None:
    cache = KVCache(16, 4, [None])
    shared = list(range(8))
    for seq in "ab":
        cache.admit(seq, shared)
        assert cache.extend(seq, 8)
    for seq in "ab":
        cache.commit(seq, shared, 8)
    mine = [*shared, 90, 91, 92, 93]
    assert cache.extend("b", 12)
    cache.commit("b", mine, 12)
    cache.release("a")
    cache.check()
    cache.release("b")
    cache.check()
    assert cache.match([*mine, 0]) == 12


def test_a_full_hit_leaves_one_token_to_compute() -> None:
    cache = KVCache(16, 4, [None])
    tokens = list(range(8))
    run(cache, "a", tokens)
    assert cache.match(tokens) == 4
    assert cache.admit("b", tokens) == 4
    assert cache.match([*tokens, 8]) == 8


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 15, 16, 17])
def test_preemption_at_a_block_boundary_keeps_what_was_computed(length: int) -> None:
    cache = KVCache(16, 4, [None])
    tokens = list(range(length))
    run(cache, "a", tokens)
    cache.release("a")
    covered = cache.admit("a", tokens)
    assert covered == (length - 1) // 4 * 4
    assert cache.extend("a", length)
    cache.commit("a", tokens, length)
    cache.check()
    cache.release("a")
    cache.check()
    assert cache.num_free == cache.num_total


def test_an_abort_in_mid_prefill_leaves_no_block_behind() -> None:
    cache = KVCache(8, 4, [None, 8])
    tokens = list(range(14))
    cache.admit("a", tokens)
    assert cache.extend("a", 14)
    cache.commit("a", tokens, 6)
    assert cache.stats.protected == 8
    cache.release("a")
    cache.check()
    assert (cache.stats.free, cache.stats.evictable, cache.stats.protected) == (6, 2, 0)


def test_evictable_blocks_are_counted_once_and_can_all_be_had() -> None:
    cache = KVCache(6, 4, [None])
    run(cache, "a", list(range(12)))
    run(cache, "b", [*range(8), *range(50, 54)])  # shares two blocks with a
    cache.release("a")
    assert (cache.stats.free, cache.stats.evictable, cache.stats.protected) == (2, 1, 3)
    cache.release("b")
    assert (cache.stats.free, cache.stats.evictable) == (2, 4)
    cache.admit("c", [99])
    assert not cache.extend("c", 25)
    assert cache.table("c") == []
    assert cache.extend("c", 24)
    assert cache.stats.evictions == 4
    cache.check()


def test_a_sequence_is_released_once() -> None:
    cache = KVCache(4, 4, [None])
    run(cache, "a", [1, 2])
    cache.release("a")
    with pytest.raises(KeyError, match="'a'"):
        cache.release("a")
    with pytest.raises(KeyError):
        cache.extend("never", 1)


def test_tenants_share_nothing() -> None:
    cache = KVCache(32, 4, [None])
    tokens = list(range(9))
    run(cache, "a", tokens, salt="one")
    for salt in (None, "", "two"):
        assert cache.match(tokens, salt) == 0
    assert cache.match(tokens, "one") == 8
    run(cache, "b", tokens, salt=None)
    assert not set(cache.table("a")) & set(cache.table("b"))


def test_the_least_recently_used_prefix_goes_first_and_from_its_end() -> None:
    cache = KVCache(6, 4, [None])
    prompts = {name: [start + i for i in range(9)] for name, start in (("a", 0), ("b", 100))}
    for name, tokens in prompts.items():
        run(cache, name, tokens)
        cache.release(name)
    cache.admit("again", prompts["a"])  # makes a the more recently used of the two
    cache.release("again")
    cache.admit("new", [7])
    assert cache.extend("new", 12)  # two blocks are free
    assert (cache.match(prompts["a"]), cache.match(prompts["b"])) == (8, 4)
    assert cache.extend("new", 16)
    assert (cache.match(prompts["a"]), cache.match(prompts["b"])) == (8, 0)
    assert cache.extend("new", 20)
    assert cache.match(prompts["a"]) == 4
    cache.check()


def test_matching_changes_nothing() -> None:
    cache = KVCache(8, 4, [None])
    run(cache, "a", list(range(9)))
    cache.release("a")
    before = cache.stats
    cache.match(list(range(9)))
    cache.match([5] * 9, "unseen salt")
    assert cache.stats == before


def test_a_long_sequence_behind_a_window_holds_a_constant_number_of_blocks() -> None:
    cache = KVCache(100, 4, [10], prefix_caching=False)
    tokens = list(range(1000))
    cache.admit("a", tokens)
    most = 0
    for end in range(1, 1001):
        assert cache.extend("a", end)
        most = max(most, cache.stats.protected)
        cache.commit("a", tokens, end)
    cache.check()
    assert most <= cache.peak_blocks(1000, chunk=1) == 4
    assert len([block for block in cache.table("a") if block]) <= 4


@pytest.mark.parametrize("window", [1, 2, 4, 5, 8, 9, 30])
@pytest.mark.parametrize("chunk", [1, 3, 4, 16])
def test_the_promised_peak_is_never_passed_and_is_reached(window: int, chunk: int) -> None:
    tokens = list(range(131))
    cache = KVCache(200, 4, [None, window], prefix_caching=False)
    most = 0
    # Every offset between chunks and blocks.
    for offset in range(1, 5):
        cache.admit("a", tokens)
        computed = 0
        while computed < len(tokens):
            end = min(computed + (chunk if computed else min(chunk, offset)), len(tokens))
            assert cache.extend("a", end)
            most = max(most, len([block for block in cache.table("a", 1) if block]))
            cache.commit("a", tokens, end)
            computed = end
        cache.release("a")
    assert most + 33 == cache.peak_blocks(131, chunk)


def test_a_window_takes_from_a_cached_prefix_only_what_it_sees() -> None:
    cache = KVCache(64, 4, [None, 8])
    tokens = list(range(41))
    run(cache, "a", tokens)
    cache.release("a")
    assert cache.admit("b", tokens) == 40
    assert all(cache.table("b", 0))
    assert [bool(block) for block in cache.table("b", 1)] == [False] * 8 + [True] * 2  # position 40 sees 33..40
    before = cache.stats.protected
    assert cache.extend("b", 44)
    assert cache.stats.protected == before + 2


def test_a_prefix_whose_window_was_evicted_is_cut_to_where_one_is_whole() -> None:
    cache = KVCache(20, 4, [None, 8])
    tokens = list(range(33))
    run(cache, "a", tokens, chunk=4)  # 8 full blocks in each group, and a ninth begun
    cache.release("a")
    cache.admit("b", [500])
    assert cache.extend("b", 16)  # takes 8 blocks, 4 of them free: the window blocks passed first are the oldest
    assert cache.stats.evictions == 4
    assert cache.match(tokens) == 32  # the last window is still whole
    assert cache.match(tokens[:13]) == 0  # position 12 sees 5..12, and those blocks were evicted
    cache.check()


def test_a_recomputed_window_mends_the_cached_prefix() -> None:
    cache = KVCache(20, 4, [None, 8])
    tokens = list(range(33))
    run(cache, "a", tokens, chunk=4)
    cache.release("a")
    cache.admit("b", [500])
    assert cache.extend("b", 16)
    cache.release("b")
    assert cache.match(tokens[:13]) == 0
    run(cache, "c", tokens[:13], chunk=4)
    cache.release("c")
    cache.check()
    assert cache.match(tokens[:13]) == 12


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_fork_shares_complete_blocks_and_never_the_partial_one(prefix_caching: bool) -> None:
    cache = KVCache(16, 4, [None], prefix_caching)
    tokens = list(range(10))
    run(cache, "parent", tokens)
    assert cache.fork("parent", "child", 10) == 8
    assert cache.table("child") == cache.table("parent")[:2]
    cache.release("parent")
    cache.check()
    assert cache.extend("child", 10)
    cache.commit("child", tokens, 10)
    cache.release("child")
    cache.check()
    assert cache.num_free == cache.num_total


def test_without_prefix_caching_blocks_are_freed_at_once() -> None:
    cache = KVCache(8, 4, [None, 8], prefix_caching=False)
    tokens = list(range(16))
    run(cache, "a", tokens)
    cache.release("a")
    assert cache.stats.free == 8
    assert cache.match(tokens) == 0


def test_a_reset_forgets_all_prefixes_even_those_in_use() -> None:
    cache = KVCache(16, 4, [None])
    tokens = list(range(12))
    run(cache, "a", tokens)
    table = list(cache.table("a"))
    cache.reset_prefix_cache()
    cache.check()
    assert cache.match([*tokens, 0]) == 0
    assert cache.table("a") == table
    assert cache.extend("a", 16)
    cache.commit("a", list(range(16)), 16)  # computed from the old prefix: not shared
    assert cache.match(list(range(17))) == 0
    cache.release("a")
    cache.check()
    assert cache.stats.free == 16


def test_a_copy_keeps_its_block_from_eviction() -> None:
    cache = KVCache(3, 4, [None])
    tokens = list(range(9))
    run(cache, "a", tokens)
    leaf = cache.table("a")[1]
    cache.release("a")
    cache.begin_copy([leaf])
    cache.admit("b", [1])
    assert not cache.extend("b", 8)  # the leaf is in flight, and its parent must wait for it
    assert cache.match(tokens) == 8
    cache.end_copy([leaf])
    cache.check()
    assert cache.extend("b", 8)
    assert cache.match(tokens) == 4
    cache.check()


def test_commit_reads_only_the_tokens_of_new_blocks() -> None:
    class Counted(list[int]):
        reads = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            found = super().__getitem__(key)
            self.reads += len(found) if isinstance(key, slice) else 1
            return found

        def __iter__(self):  # type: ignore[no-untyped-def]
            raise AssertionError("the whole list was read")

    cache = KVCache(1000, 4, [None, 8])
    tokens = Counted(range(2000))
    cache.admit("a", [0])
    for end in range(1, 2001):
        assert cache.extend("a", end)
        cache.commit("a", tokens, end)
    assert tokens.reads == 2000


def test_hits_and_queries_are_counted_in_tokens() -> None:
    cache = KVCache(32, 4, [None])
    run(cache, "a", list(range(10)))
    for seq in ("b", "c", "d"):
        cache.admit(seq, list(range(10)))
        if seq != "c":  # was never scheduled
            cache.count_query(seq)
        cache.release(seq)
    assert (cache.stats.query_tokens, cache.stats.hit_tokens) == (20, 16)


def test_an_impossible_cache_is_refused() -> None:
    with pytest.raises(SpilloverError, match="0 blocks"):
        KVCache(0, 16, [None])
    with pytest.raises(SpilloverError, match="at least 1"):
        KVCache(4, 16, [0])


def test_block_names_are_the_same_in_every_process() -> None:
    cache = KVCache(8, 4, [None], identity=b"model,bf16,layout")
    tokens = list(range(9))
    run(cache, "a", tokens, salt="s")
    names = [cache.tree.key(block) for block in cache.table("a")[:2]]
    root = root_digest(b"model,bf16,layout", "s")
    assert names == list(prefix_keys(tokens, 4, root))
    assert names[1].hex() == "ca73bce32215e09ab999cab2f9c588c66fd87e1e08d7d9aa0fc14bbdbb24e190" + "00"


def test_block_names_differ_by_prefix_salt_and_identity() -> None:
    tokens = list(range(8))
    names = {
        tuple(prefix_keys(tokens, 4, root_digest(b"m", None)))[1],
        tuple(prefix_keys(tokens, 4, root_digest(b"m", "")))[1],
        tuple(prefix_keys(tokens, 4, root_digest(b"m", "s")))[1],
        tuple(prefix_keys(tokens, 4, root_digest(b"n", None)))[1],
        tuple(prefix_keys([9, *tokens[1:]], 4, root_digest(b"m", None)))[1],
        *prefix_keys(tokens, 8, root_digest(b"m", None)),
    }
    assert len(names) == 6


def test_lru_remembers_use_and_not_arrival() -> None:
    policy = LRU()
    for block in (1, 2, 3):
        policy.on_access([block])
    for block in (3, 1, 2):
        policy.on_insert(block)
    assert policy.victim() == 1
    policy.on_remove(1)
    assert policy.victim() == 2
    policy.on_access([2])
    assert policy.victim() == 3
    for block in (2, 3):
        policy.on_remove(block)
    assert policy.victim() is None


@pytest.mark.parametrize("windows", [(None,), (None, 10), (6, None)], ids=str)
@settings(deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_a_commit_of_many_blocks_is_the_commit_of_each(windows: tuple[int | None, ...], rng: random.Random) -> None:
    """Sequences with shared prefixes, computed at once or token by token, have the same tables, tree and evictions."""
    caches = [KVCache(60 * len(windows), 4, windows) for _ in range(2)]
    for number in range(rng.randint(1, 6)):
        prompts = [[rng.randint(0, 1) for _ in range(4 * rng.randint(1, 4))] * 2 for _ in range(rng.randint(1, 3))]
        together = rng.random() < 0.5
        for cache, step in zip(caches, (1000, 1), strict=True):
            found = [cache.admit(f"{number}.{i}", prompt) for i, prompt in enumerate(prompts)] if together else []
            for i, prompt in enumerate(prompts):
                seq = f"{number}.{i}"
                computed = found[i] if together else cache.admit(seq, prompt)
                assert cache.extend(seq, len(prompt))
                while computed < len(prompt):
                    computed = min(len(prompt), computed + step)
                    cache.commit(seq, prompt, computed)
                    cache.check()
            for i in range(len(prompts)):
                cache.release(f"{number}.{i}")
                cache.check()
        assert caches[0].stats == caches[1].stats
    evicted: list[list[bytes]] = [[], []]
    for cache, keys in zip(caches, evicted, strict=True):
        assert cache.tree.evict(cache.num_total, lambda blocks, cache=cache, keys=keys:  # type: ignore[misc]
                                keys.extend(map(cache.tree.key, blocks)) or True)
    assert evicted[0] == evicted[1]


@settings(deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_blocks_evicted_together_are_those_evicted_one_by_one(rng: random.Random) -> None:
    """The same blocks are evicted up to the first that may not be, also while a sequence holds some of them."""
    caches = [KVCache(90, 4, (None,)) for _ in range(2)]
    prompts: list[list[int]] = [[]]
    for _ in range(rng.randint(1, 8)):  # each shares a prefix with an earlier one
        begin = rng.choice(prompts)
        prompts.append(begin[: 4 * rng.randint(0, 6)] + [rng.randint(0, 1) for _ in range(4 * rng.randint(0, 3))])
    prompts = [prompt for prompt in prompts if prompt][:8]
    stays = rng.choice([None, *range(len(prompts))])
    for cache in caches:
        for number, prompt in enumerate(prompts):
            computed = cache.admit(str(number), prompt)
            assert cache.extend(str(number), len(prompt))
            if computed < len(prompt):
                cache.commit(str(number), prompt, len(prompt))
            if number != stays:
                cache.release(str(number))
    refused = rng.choice([None, *range(1, 90)])
    wanted = rng.randint(caches[0].pool.free, 90)
    evicted: list[list[bytes]] = [[], []]

    def evict(cache: KVCache, keys: list[bytes], wanted: int) -> bool:
        def can_evict(blocks: Sequence[int]) -> bool:
            if refused in blocks:
                return False
            keys.extend(map(cache.tree.key, blocks))
            return True

        return cache.tree.evict(wanted, can_evict)

    together = evict(caches[0], evicted[0], wanted)
    while (one := caches[1].pool.free < wanted) and evict(caches[1], evicted[1], caches[1].pool.free + 1):
        caches[1].check()
    assert together == (not one)
    assert evicted[0] == evicted[1]
    assert caches[0].stats == caches[1].stats
    caches[0].check()


def test_a_policy_hears_nothing_of_a_victim_that_may_not_go() -> None:
    class Told(LRU):
        def on_insert(self, block: int) -> None:
            told.append(block)
            super().on_insert(block)

        def on_remove(self, block: int) -> None:
            told.append(-block)
            super().on_remove(block)

    told: list[int] = []
    cache = KVCache(9, 4, (None,), policy=Told())
    run(cache, "a", list(range(12)))
    first, second, third = cache.table("a")
    cache.release("a")
    assert told == [third]
    told.clear()
    assert not cache.tree.evict(9, lambda blocks: False)
    assert told == []
    assert not cache.tree.evict(9, lambda blocks: first not in blocks)
    assert told == [-third, first], "the block between was never to be chosen"
    assert cache.pool.free == 8
    assert cache.pool.state(second) is FREE
    cache.check()
