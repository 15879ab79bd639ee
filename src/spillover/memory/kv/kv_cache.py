"""The KV cache as the scheduler sees it: sequences, their block tables, and prefixes shared between them.

One pool serves all layer groups, since every block has the same size. A sequence has one table per group, all of the
same length; entry i is the block of positions [i * block_size, (i + 1) * block_size), or 0 once a sliding window has
moved past it. Tables always cover all computed tokens, so extend() never allocates blocks before a window.
"""

from collections.abc import Sequence
from itertools import chain

from spillover.errors import SpilloverError
from spillover.memory.kv.blocks import BlockPool
from spillover.memory.kv.digest import TOKEN_BYTES, packed, root_digest
from spillover.memory.kv.loans import BlockLender, Loans
from spillover.memory.kv.prefix_tree import Evictor, Node, PrefixTree
from spillover.memory.kv.sequence import CacheStats, SequenceBlocks
from spillover.memory.kv.windows import first_seen, usable_blocks
from spillover.memory.policies import LRU, EvictionPolicy


class KVCache:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        windows: Sequence[int | None],
        prefix_caching: bool = True,
        identity: bytes = b"",
        policy: EvictionPolicy | None = None,
        most_blocks: int | None = None,
        lender: BlockLender | None = None,
    ) -> None:
        """Create an empty cache. `windows`: one entry per layer group, None for full attention; `identity`: digest of
        model, dtype and layout; `lender`: lends additional blocks when it can, with ids up to `most_blocks`."""
        if num_blocks < 1 or block_size < 1:
            raise SpilloverError(f"a KV cache needs room for a token; got {num_blocks} blocks of {block_size} tokens")
        if not windows or any(window is not None and window < 1 for window in windows):
            raise SpilloverError(f"layer groups with windows {list(windows)}: each is None or at least 1 token")
        self.block_size = block_size
        self.windows = tuple(windows)
        self.prefix_caching = prefix_caching
        self.identity = identity
        self.pool = BlockPool(num_blocks, most_blocks)
        self.tree = PrefixTree(self.pool, self.windows, policy if policy is not None else LRU(), identity)
        self.evictor: Evictor = self.tree  # a connector may replace it by its own
        self.loans = Loans(self.pool, self.tree, lender, lambda blocks: self.evictor.can_evict(blocks))
        self._live: dict[str, SequenceBlocks] = {}
        # Full-attention groups first: of blocks released together, the one that represents its node is the older.
        self._group_order = sorted(range(len(self.windows)), key=lambda group: self.windows[group] is not None)
        self._window_groups = [(group, window) for group, window in enumerate(self.windows) if window is not None]
        self._query_tokens = 0
        self._hit_tokens = 0

    @property
    def num_total(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Return the number of blocks that extend() can use: free ones and evictable ones."""
        return self.pool.free + self.pool.evictable

    @property
    def num_in_flight(self) -> int:
        """Return the number of blocks in a copy to or from another tier, which may soon be available."""
        return self.pool.in_flight

    @property
    def occupancy(self) -> tuple[int, ...]:
        """Return numbers of which at least one changes whenever more blocks are available or prefixes change."""
        return self.num_free, self.num_total, self.tree.num_nodes, self.tree.num_evictions

    @property
    def stats(self) -> CacheStats:
        pool, tree = self.pool, self.tree
        return CacheStats(
            total=pool.num_blocks,
            free=pool.free,
            evictable=pool.evictable,
            protected=pool.protected,
            in_flight=pool.in_flight,
            tree_nodes=tree.num_nodes,
            query_tokens=self._query_tokens,
            hit_tokens=self._hit_tokens,
            evictions=tree.num_evictions,
        )

    def used_blocks(self) -> list[int]:
        """Return the blocks that have KV of a sequence or a cached prefix."""
        return self.pool.used()

    def usage(self) -> float:
        """Return the share of blocks that are held by sequences or in flight, 0 to 1."""
        return 1 - self.num_free / self.num_total

    def match(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """Return how many tokens of a prompt admit() would find; less than len(tokens): one is left to compute."""
        return len(self._find(tokens, salt)) * self.block_size

    def admit(self, seq: str, tokens: Sequence[int], salt: str | None = None) -> int:
        """Start a sequence with the longest cached prefix; return how many tokens that has, always whole blocks."""
        self._must_be_new(seq)
        nodes = self._find(tokens, salt)
        sequence = self._start(seq, [node.blocks for node in nodes])
        if self.prefix_caching:
            sequence.node = nodes[-1] if nodes else self.tree.root(salt)
            self.tree.enter(sequence.node)
        sequence.num_queried = len(tokens)
        return sequence.num_computed

    def count_query(self, seq: str) -> None:
        """Count a newly admitted sequence in the statistics: its tokens as queried, its cached prefix as hit."""
        sequence = self._get(seq)
        self._query_tokens += sequence.num_queried
        self._hit_tokens += sequence.num_computed if sequence.num_queried else 0

    def fork(self, parent: str, child: str, num_tokens: int) -> int:
        """Start `child` with the parent's complete blocks of the first `num_tokens` tokens, never with a partial block.

        Return the number of tokens covered, which may be num_tokens: for a child that still has to compute its last
        token, pass one less. Works without prefix caching too.
        """
        self._must_be_new(child)
        source = self._get(parent)
        path = self.tree.path(source.node) if source.node is not None else []  # path[i + 1] is block i's node
        blocks: list[list[int | None]] = []
        for i in range(min(num_tokens // self.block_size, source.num_ready)):
            # Blocks that the parent's window has moved past may still be in the tree.
            cached = path[i + 1].blocks if path else [None] * len(self.windows)
            blocks.append([table[i] or kept for table, kept in zip(source.tables, cached, strict=True)])
        del blocks[usable_blocks(blocks, self.windows, self.block_size) :]
        sequence = self._start(child, blocks)
        if path:
            sequence.node = path[len(blocks)]
            self.tree.enter(sequence.node)
            for i, held in source.held.items():
                if i < len(blocks):
                    sequence.held[i] = list(held)
                    self.tree.ref(held)
        return sequence.num_computed

    def extend(self, seq: str, num_tokens: int, urgent: bool = True) -> bool:
        """Make the tables cover num_tokens positions, evicting as needed; False, with nothing changed, if it cannot.

        A call that is not urgent fails for now if the evicted blocks should be copied to another tier first.
        """
        tables = self._get(seq).tables
        new = -(-num_tokens // self.block_size) - len(tables[0])
        if new <= 0:
            return True
        if not self._ensure_free(new * len(tables), urgent):
            return False
        for table in tables:
            table.extend(self.pool.allocate(new))
        return True

    def commit(self, seq: str, tokens: Sequence[int], num_computed: int) -> None:
        """Note that the KV of tokens[:num_computed] is stored: full blocks become ready and enter the tree; blocks that
        the next position's window does not reach leave the table. Only tokens of newly full blocks are read."""
        sequence = self._get(seq)
        size = self.block_size
        assert sequence.num_computed <= num_computed <= len(sequence.tables[0]) * size, (
            f"commit of {num_computed} tokens for {seq!r}, which had {sequence.num_computed} computed "
            f"and blocks for {len(sequence.tables[0]) * size}"
        )
        sequence.num_computed = num_computed
        first, end = sequence.num_ready, num_computed // size
        if first < end:
            tables = [table[first:end] for table in sequence.tables]
            for table in tables:
                self.pool.complete(filter(None, table))  # 0: outside the window of a restored prefix, so not loaded
            if sequence.node is not None:
                span = packed(tokens[first * size : end * size])
                assert len(span) == (end - first) * size * TOKEN_BYTES, (
                    f"commit of {num_computed} tokens for {seq!r}, given only {len(tokens)}"
                )
                node, held = self.tree.insert(sequence.node, span, tables)
                sequence.held.update((first + index, blocks) for index, blocks in held.items())
                self.tree.enter(node)
                self.tree.leave(sequence.node)
                sequence.node = node
            sequence.num_ready = end
        for group, window in self._window_groups:
            self._drop_before(sequence, group, first_seen(num_computed, window, size))

    def release(self, seq: str) -> None:
        """Release a finished, aborted or preempted sequence: its cached blocks become evictable, the others free."""
        sequence = self._get(seq)
        del self._live[seq]
        # Tail first: the end of a prefix is the least likely to be used again.
        rows: list[tuple[int, ...]] = list(zip(*(sequence.tables[group] for group in self._group_order), strict=True))
        for i, held in sequence.held.items():
            rows[i] += tuple(held)
        self.tree.unref(list(filter(None, chain.from_iterable(reversed(rows)))))
        if sequence.node is not None:
            self.tree.leave(sequence.node)

    def adopt(self, seq: str, fork: str) -> None:
        """Give `seq` the blocks of a fork of it instead of its own, which are released; the fork ends."""
        have, ready = self._get(fork).num_ready, self._get(seq).num_ready
        assert have == ready, f"the fork {fork!r} has {have} of the {ready} complete blocks of {seq!r}"
        self.release(seq)
        self._live[seq] = self._live.pop(fork)

    def table(self, seq: str, group: int = 0) -> list[int]:
        """Return the live block table; the caller reads it and does not change it."""
        return self._get(seq).tables[group]

    def num_ready(self, seq: str) -> int:
        """Return the number of leading blocks that are complete."""
        return self._get(seq).num_ready

    def blocks_needed(self, seq: str | None, num_tokens: int) -> int:
        """Return the number of blocks that extend(seq, num_tokens) allocates; None: for a sequence with no blocks."""
        have = 0 if seq is None else len(self._get(seq).tables[0])
        return max(0, -(-num_tokens // self.block_size) - have) * len(self.windows)

    def peak_blocks(self, num_tokens: int, chunk: int) -> int:
        """Return the most blocks a sequence of num_tokens ever holds, if each extend() adds at most `chunk` tokens to
        those committed: a window needs only the chunk and the tokens that the chunk's first token sees."""
        whole = -(-num_tokens // self.block_size)
        peak = 0
        for window in self.windows:
            seen = whole if window is None else -(-(window + chunk - 2) // self.block_size) + 1
            peak += min(whole, seen)
        return peak

    @property
    def may_grow(self) -> bool:
        """Return whether there is a lender: one that lends nothing now may do so in the next step."""
        return self.loans.lender is not None

    def grow(self, blocks: int) -> bool:
        """Borrow at least n blocks, if there is a lender; return whether any were lent."""
        return self.loans.grow(blocks)

    def shrink(self) -> bool:
        """Return borrowed blocks to the lender if enough others are free; return whether any were returned."""
        return self.loans.shrink()

    def drop_duplicates(self, seq: str) -> bool:
        """Drop the tree's blocks that duplicate blocks of the only live sequence; return whether there were any, which
        can now be evicted. The tree is emptied: all its blocks in use belong to this sequence."""
        if not self._get(seq).held:
            return False
        self.reset_prefix_cache()
        return True

    # For a connector to other tiers

    def cached_prefix(self, tokens: Sequence[int], salt: str | None) -> tuple[int, bytes]:
        """Return how many blocks of this prompt admit() would find now, and the digest of their prefix."""
        nodes = self._find(tokens, salt)
        return len(nodes), nodes[-1].digest if nodes else root_digest(self.identity, salt)

    def ready_prefix(self, seq: str, salt: str | None) -> tuple[int, bytes]:
        """Return how many leading blocks of a sequence are complete, and the digest of their prefix; 0 and the root's
        digest if the sequence is no longer in the tree."""
        sequence = self._get(seq)
        if sequence.node is None:
            return 0, root_digest(self.identity, salt)
        return sequence.num_ready, sequence.node.digest

    def extend_to_load(self, seq: str, num_blocks: int) -> bool:
        """Make the tables cover num_blocks whole blocks, to be loaded or computed; of a window group, only those that
        the position after them sees. False, with nothing changed, if there is no room."""
        sequence, size = self._get(seq), self.block_size
        have = len(sequence.tables[0])
        seen = [first_seen(num_blocks * size, window, size) for window in self.windows]
        if not self._ensure_free(sum(num_blocks - max(have, start) for start in seen), urgent=False):
            return False
        for group, start in enumerate(seen):
            self._drop_before(sequence, group, start)
            table = sequence.tables[group]
            table.extend([0] * (start - have))
            table.extend(self.pool.allocate(num_blocks - len(table)))
        sequence.load_end = num_blocks
        return True

    def drop_offloaded(self, seq: str, num_blocks: int) -> None:
        """Remove the first num_blocks from the table of a full-attention sequence: host memory has them."""
        sequence = self._get(seq)
        self._drop_before(sequence, 0, num_blocks)
        sequence.num_offloaded = num_blocks

    def begin_copy(self, blocks: Sequence[int]) -> None:
        """Begin a copy to or from another tier: none of the blocks is reused, freed or evicted until end_copy()."""
        self.tree.begin_copy(blocks)

    def end_copy(self, blocks: Sequence[int]) -> None:
        self.tree.end_copy(blocks)

    def reset_prefix_cache(self) -> None:
        """Forget every prefix. Running sequences keep their blocks, no longer share them, and free them on release."""
        self.tree.reset()
        for sequence in self._live.values():
            sequence.node = None
            self.tree.unref(list(chain.from_iterable(sequence.held.values())))
            sequence.held.clear()

    def check(self) -> None:
        """Assert that free + evictable + protected + in flight == total, and every invariant that this relies on."""
        self.pool.check()
        self.tree.check()
        refs = [0] * (self.pool.most + 1)
        for seq, sequence in self._live.items():
            assert len({len(table) for table in sequence.tables}) == 1, f"tables of {seq!r} differ in length"
            assert sequence.num_computed // self.block_size == sequence.num_ready
            for group, table in enumerate(sequence.tables):
                first = sequence.first[group]
                assert [bool(block) for block in table] == [i >= first for i in range(len(table))], (
                    f"{seq!r}, group {group}: {table} should be 0 before entry {first}, and only there"
                )
                end = max(sequence.num_computed, sequence.load_end * self.block_size)
                assert first == max(sequence.num_offloaded, first_seen(end, self.windows[group], self.block_size))
                for block in table[first:]:
                    refs[block] += 1
            for held in sequence.held.values():
                for block in held:
                    refs[block] += 1
        for block in range(1, self.pool.most + 1):
            assert refs[block] == self.pool.refs(block), (
                f"block {block} has {self.pool.refs(block)} references, {refs[block]} holders"
            )

    def _get(self, seq: str) -> SequenceBlocks:
        try:
            return self._live[seq]
        except KeyError:
            raise KeyError(f"no sequence {seq!r} holds blocks: it was never admitted, or is released") from None

    def _must_be_new(self, seq: str) -> None:
        assert seq not in self._live, f"sequence {seq!r} already holds blocks"

    def _find(self, tokens: Sequence[int], salt: str | None) -> list[Node]:
        if not self.prefix_caching:
            return []
        limit = (len(tokens) - 1) // self.block_size * self.block_size
        nodes = self.tree.walk(packed(tokens)[: limit * TOKEN_BYTES], self.block_size * TOKEN_BYTES, salt)
        if self._window_groups:  # blocks of window groups may have left the tree before their nodes
            del nodes[usable_blocks([node.blocks for node in nodes], self.windows, self.block_size) :]
        return nodes

    def _start(self, seq: str, blocks: Sequence[Sequence[int | None]]) -> SequenceBlocks:
        """Start a sequence that holds these complete blocks; of a window group, only those the next position sees."""
        computed = len(blocks) * self.block_size
        first = [first_seen(computed, window, self.block_size) for window in self.windows]
        tables: list[list[int]] = []
        for group, start in enumerate(first):
            shared = [row[group] or 0 for row in blocks[start:]]
            assert 0 not in shared
            self.tree.ref(shared)
            tables.append([0] * min(start, len(blocks)) + shared)
        self._live[seq] = sequence = SequenceBlocks(tables, first, computed, len(blocks))
        return sequence

    def _drop_before(self, sequence: SequenceBlocks, group: int, end: int) -> None:
        """Remove the entries before `end` from a group's table."""
        table, first = sequence.tables[group], sequence.first[group]
        if first < end:
            self.tree.unref(table[first:end])
            table[first:end] = [0] * len(table[first:end])
            sequence.first[group] = end

    def _ensure_free(self, blocks: int, urgent: bool = True) -> bool:
        return self.num_free >= blocks and self.evictor.ensure_free(blocks, urgent)
