"""The KV cache as the scheduler sees it: sequences, their block tables, and prefixes shared between them.

One pool serves all layer groups, since every block has the same bytes. A sequence has one table a group, all of the
same length; entry i is the block of positions [i * block_size, (i + 1) * block_size), and 0 where a sliding window has
moved past. Tables always cover what is computed, so extend() never allocates behind a window.
"""

import time
from collections.abc import Sequence

from spillover.errors import SpilloverError
from spillover.memory.blocks import BlockPool
from spillover.memory.digest import root_digest
from spillover.memory.loans import BlockLender, Loans
from spillover.memory.parking import Parking
from spillover.memory.policies import LRU, EvictionPolicy
from spillover.memory.prefix_tree import Node, PrefixTree
from spillover.memory.restore import Restore, Restorer
from spillover.memory.sequence import CacheStats, SequenceBlocks
from spillover.memory.spiller import Spiller
from spillover.memory.store import SpillStore
from spillover.memory.windows import first_seen, usable_blocks

MAX_PUT_OFF = 8  # times in a row that poll() may be, while there are enough blocks to be had
READY_SHARE = 8  # one in so many blocks can be had without a copy, at least


class KVCache:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        windows: Sequence[int | None],
        prefix_caching: bool = True,
        identity: bytes = b"",
        policy: EvictionPolicy | None = None,
        store: SpillStore | None = None,
        margin: int = 32,
        most_blocks: int | None = None,
        lender: BlockLender | None = None,
    ) -> None:
        """`windows` has one entry a layer group, None for full attention; `identity` digests model, dtype, layout.
        `store` is what lies below the device, and `margin` how many blocks, at least, are kept ready to be
        overwritten. `lender` brings more blocks where it can, of numbers up to `most_blocks`."""
        if num_blocks < 1 or block_size < 1:
            raise SpilloverError(f"a KV cache of {num_blocks} blocks of {block_size} tokens cannot hold a single token")
        if not windows or any(window is not None and window < 1 for window in windows):
            raise SpilloverError(f"layer groups with windows {list(windows)}: each is None or at least 1 token")
        self.block_size = block_size
        self.windows = tuple(windows)
        self.prefix_caching = prefix_caching
        self._identity = identity
        self._pool = BlockPool(num_blocks, most_blocks)
        self._tree = PrefixTree(self._pool, self.windows, policy if policy is not None else LRU(), identity)
        self.store = store if prefix_caching else None
        self._spiller = self.restorer = self._parking = None
        if self.store is not None:
            margin = min(max(margin, num_blocks // READY_SHARE), num_blocks // 2)
            self._spiller = Spiller(self._pool, self._tree, self.store, margin)
            self.restorer = Restorer(self.store, block_size, self.windows)
            self._parking = Parking(self._tree, self.store, lambda: self.reset_prefix_cache(stored=False))
        may_go = self._spiller.may_go if self._spiller is not None else lambda blocks: True
        self.loans = Loans(self._pool, self._tree, lender, may_go)
        self._put_off = 0
        self._live: dict[str, SequenceBlocks] = {}
        # Full-attention groups first: of two blocks released together, the one that stands for its node is the older.
        self._group_order = sorted(range(len(self.windows)), key=lambda group: self.windows[group] is not None)
        self._window_groups = [(group, window) for group, window in enumerate(self.windows) if window is not None]
        self._query_tokens = 0
        self._hit_tokens = 0

    @property
    def num_total(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that extend() can have: free, or evictable."""
        return self._pool.free + self._pool.evictable

    @property
    def stats(self) -> CacheStats:
        pool, tree = self._pool, self._tree
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
        """Those that hold KV of a sequence or a prefix."""
        return self._pool.used()

    def usage(self) -> float:
        """The share of blocks that sequences and copies hold, 0 to 1."""
        return 1 - self.num_free / self.num_total

    def match(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """How many tokens of this prompt admit() would find now; less than len(tokens), so one is left to compute."""
        return len(self._find(tokens, salt)) * self.block_size

    def admit(self, seq: str, tokens: Sequence[int], salt: str | None = None) -> int:
        """Starts a sequence on the longest cached prefix; returns how many tokens that covers, always whole blocks."""
        self._must_be_new(seq)
        nodes = self._find(tokens, salt)
        sequence = self._start(seq, [node.blocks for node in nodes])
        if self.prefix_caching:
            sequence.node = nodes[-1] if nodes else self._tree.root(salt)
            self._tree.enter(sequence.node)
        sequence.asked = len(tokens)
        return sequence.num_computed

    def count_query(self, seq: str) -> None:
        """The sequence just admitted is to run, so its prompt counts as asked for, and what was found of it as hit."""
        sequence = self._get(seq)
        self._query_tokens += sequence.asked
        self._hit_tokens += sequence.num_computed if sequence.asked else 0

    def fork(self, parent: str, child: str, num_tokens: int) -> int:
        """Starts `child` on the parent's complete blocks of its first `num_tokens` tokens, never on a partial one.

        Returns the tokens covered, which may be all of num_tokens: a child that still has to compute its last token
        asks for one less. Works without prefix caching too.
        """
        self._must_be_new(child)
        source = self._get(parent)
        path = self._tree.path(source.node) if source.node is not None else []  # path[i + 1] is block i's node
        blocks: list[list[int | None]] = []
        for i in range(min(num_tokens // self.block_size, source.num_ready)):
            # What the parent's window has passed may still be in the tree.
            cached = path[i + 1].blocks if path else [None] * len(self.windows)
            blocks.append([table[i] or kept for table, kept in zip(source.tables, cached, strict=True)])
        del blocks[usable_blocks(blocks, self.windows, self.block_size) :]
        sequence = self._start(child, blocks)
        if path:
            sequence.node = path[len(blocks)]
            self._tree.enter(sequence.node)
            for i, held in source.held.items():
                if i < len(blocks):
                    sequence.held[i] = list(held)
                    for block in held:
                        self._tree.ref(block)
        return sequence.num_computed

    def extend(self, seq: str, num_tokens: int, urgent: bool = True) -> bool:
        """Makes the tables cover num_tokens positions, evicting as needed; False and unchanged if blocks are short.

        Who is not urgent rather waits until what is evicted has been copied to another tier.
        """
        tables = self._get(seq).tables
        new = -(-num_tokens // self.block_size) - len(tables[0])
        if new <= 0:
            return True
        if not self._make_room(new * len(tables), urgent):
            return False
        for table in tables:
            table.extend([self._pool.allocate() for _ in range(new)])
        return True

    def commit(self, seq: str, tokens: Sequence[int], num_computed: int) -> None:
        """tokens[:num_computed] have their KV stored: full blocks become ready and enter the tree; blocks wholly behind
        a window of the next position leave the table. Reads only the tokens of blocks that became full."""
        sequence = self._get(seq)
        size = self.block_size
        assert sequence.num_computed <= num_computed <= len(sequence.tables[0]) * size, (
            f"commit of {num_computed} tokens for {seq!r}, which had {sequence.num_computed} computed "
            f"and blocks for {len(sequence.tables[0]) * size}"
        )
        sequence.num_computed = num_computed
        for i in range(sequence.num_ready, num_computed // size):
            blocks = [table[i] for table in sequence.tables]
            for block in blocks:
                if block:  # of a restored prefix, what lies behind a window was not loaded
                    self._pool.complete(block)
            if sequence.node is not None:
                span = tuple(tokens[i * size : (i + 1) * size])
                assert len(span) == size, f"commit of {num_computed} tokens for {seq!r}, given only {len(tokens)}"
                node, held = self._tree.insert(sequence.node, span, blocks)
                if held:
                    sequence.held[i] = held
                self._tree.enter(node)
                self._tree.leave(sequence.node)
                sequence.node = node
            sequence.num_ready = i + 1
        if sequence.restore is not None and num_computed >= sequence.restore.end * size:
            sequence.restore = None
        for group, window in self._window_groups:
            table = sequence.tables[group]
            for i in range(sequence.first[group], first_seen(num_computed, window, size)):
                self._tree.unref(table[i])
                table[i] = 0
                sequence.first[group] = i + 1

    def release(self, seq: str) -> None:
        """Ends a sequence (finished, aborted or preempted): what is in the tree becomes evictable, the rest free."""
        sequence = self._get(seq)
        del self._live[seq]
        if self._parking is not None:
            if sequence.restore is not None:
                sequence.restore.drop()
            self._parking.release(sequence)
        # Tail first: the end of a prefix is the least likely to be asked for again.
        for i in reversed(range(len(sequence.tables[0]))):
            for group in self._group_order:
                if sequence.tables[group][i]:
                    self._tree.unref(sequence.tables[group][i])
            for block in sequence.held.get(i, ()):
                self._tree.unref(block)
        if sequence.node is not None:
            self._tree.leave(sequence.node)

    def table(self, seq: str, group: int = 0) -> list[int]:
        """The live block table; the caller reads it and does not change it."""
        return self._get(seq).tables[group]

    def blocks_needed(self, seq: str | None, num_tokens: int) -> int:
        """New blocks that extend(seq, num_tokens) takes; for None, those of a sequence with nothing cached."""
        have = 0 if seq is None else len(self._get(seq).tables[0])
        return max(0, -(-num_tokens // self.block_size) - have) * len(self.windows)

    def peak_blocks(self, num_tokens: int, chunk: int) -> int:
        """The most blocks a sequence of num_tokens ever holds, if at most `chunk` tokens stand between commit and
        extend: windows need no more than the chunk and what its first token sees."""
        whole = -(-num_tokens // self.block_size)
        peak = 0
        for window in self.windows:
            seen = whole if window is None else -(-(window + chunk - 2) // self.block_size) + 1
            peak += min(whole, seen)
        return peak

    # Other tiers

    def poll(self) -> None:
        """Takes in what copies have brought since the last call, and starts new ones; between any two steps, and while
        waiting."""
        if self.store is None or self._spiller is None:
            return
        self._put_off = 0
        self.store.poll()
        if self._parking:
            self._parking.poll()
        self._spiller.poll()

    def poll_loads(self) -> None:
        """Of poll(), what requests wait for: a small part of its work, and the rest may be put off a while."""
        if self.store is not None:
            self.store.poll_loads()

    def put_off(self) -> bool:
        """Whether poll() can wait for another step; asked instead of calling it."""
        self._put_off += 1
        return self._spiller is None or (self._put_off < MAX_PUT_OFF and not self._parking and not self._spiller.low)

    def close(self, deadline: float) -> None:
        """Ends all copies. What only the device or host memory has is first written to the tiers that last, in time."""
        if self.store is None or self._spiller is None:
            return
        if self.store.tiers:
            grace = time.monotonic()
            while grace < deadline and (self._spiller.flush() or self.busy):
                self.poll()
                self.store.flush(min(deadline, grace + 0.1))
                grace = time.monotonic()
        self.store.close(deadline)

    def keep_ready(self, blocks: int) -> None:
        """Requests that decode may want so many blocks at any moment: others and copies leave them alone."""
        if self._spiller is not None:
            self._spiller.reserve = min(blocks, self.num_total // 4)

    @property
    def busy(self) -> bool:
        """Whether copies are under way that poll() would take further."""
        return self.store is not None and self.store.busy

    @property
    def settling(self) -> bool:
        """Whether copies are under way whose blocks may soon be had."""
        return self._pool.in_flight > 0

    def seek(self, seq: str, tokens: Sequence[int], salt: str | None) -> None:
        """Asks the other tiers for what the device does not have of a prompt that waits."""
        if self.restorer is not None:
            nodes = self._find(tokens, salt)
            digest = nodes[-1].digest if nodes else root_digest(self._identity, salt)
            self.restorer.seek(seq, tokens, len(nodes), digest)

    def stored(self, seq: str, tokens: Sequence[int], salt: str | None) -> list[str]:
        """The tiers of the blocks after those that an admitted sequence found on the device."""
        assert self.restorer is not None
        have = len(self._get(seq).tables[0])
        if not self.restorer.covers(seq, have):
            self.restorer.forget(seq)
            self.seek(seq, tokens, salt)
        return self.restorer.found(seq, have)

    def restore(self, seq: str, sources: Sequence[str], first: int) -> bool:
        """Starts loading blocks first .. first + len(sources) of the sequence from these tiers; the tables cover them
        from now on. Blocks before `first` that are not on the device are to be computed meanwhile. False and unchanged
        if there is no room."""
        assert self.restorer is not None
        sequence = self._get(seq)
        have, end = len(sequence.tables[0]), first + len(sources)
        seen = [first_seen(end * self.block_size, window, self.block_size) for window in self.windows]
        if not self._make_room(sum(end - max(have, start) for start in seen), urgent=False):
            return False
        for group, start in enumerate(seen):
            table = sequence.tables[group]
            for i in range(sequence.first[group], min(start, have)):
                self._tree.unref(table[i])
                table[i] = 0
            sequence.first[group] = max(sequence.first[group], start)
            table.extend([0] * (start - have))
            table.extend([self._pool.allocate() for _ in range(end - len(table))])
        sequence.restore = self.restorer.start(seq, sequence.tables, sources, first, have < first, self._tree.end_copy)
        for block in sequence.restore.blocks():
            self._tree.begin_copy(block)
        self.restorer.send(sequence.restore)
        return True

    def restoring(self, seq: str) -> Restore | None:
        return self._get(seq).restore

    def park(self, seq: str, unit: int) -> bool:
        """Starts moving the sequence's oldest `unit` blocks to host memory, because the device has no room for more.

        For a sequence that is alone, has no step in flight, and whose layers all see every token. True while blocks are
        on their way, so that room is to come; False if none can be moved. The prefix tree is emptied: all that is left
        in it belongs to this sequence.
        """
        if self._parking is None or self.windows != (None,):
            return False
        return self._parking.start(self._get(seq), unit)

    def let_go_of_twins(self, seq: str) -> bool:
        """Whether a sequence that is alone held blocks of the tree besides its own for the same tokens, which are now
        to be had. The tree is emptied: it is all of this sequence."""
        if not self._get(seq).held:
            return False
        self.reset_prefix_cache(stored=False)
        return True

    def cold(self, seq: str) -> tuple[int, ...]:
        """Return the addresses in host memory of the sequence's leading blocks, whose table entries are 0."""
        return self._get(seq).cold_addresses

    def begin_copy(self, block: int) -> None:
        """A copy to or from another tier starts: the block is neither reused, freed nor evicted until end_copy."""
        self._tree.begin_copy(block)

    def end_copy(self, block: int) -> None:
        self._tree.end_copy(block)

    def reset_prefix_cache(self, stored: bool = True, external: bool = False) -> None:
        """Forgets every prefix. Running sequences keep their blocks, share them no more, and free them at the end.

        `stored`: also what host memory holds; `external`: also what lies on disk and in a remote store.
        """
        if self.store is not None and stored:
            self.store.clear(external)
        self._tree.reset()
        for sequence in self._live.values():
            sequence.node = None
            for held in sequence.held.values():
                for block in held:
                    self._tree.unref(block)
            sequence.held.clear()

    def check(self) -> None:
        """Asserts the invariant, free + evictable + protected + in flight == total, and all that it rests on."""
        self._pool.check()
        self._tree.check()
        if self._spiller is not None and self.store is not None:
            self._spiller.check()
            self.store.check()
        refs = [0] * (self._pool.most + 1)
        for seq, sequence in self._live.items():
            assert len({len(table) for table in sequence.tables}) == 1, f"tables of {seq!r} differ in length"
            assert sequence.num_computed // self.block_size == sequence.num_ready
            for group, table in enumerate(sequence.tables):
                first = sequence.first[group]
                assert [bool(block) for block in table] == [i >= first for i in range(len(table))], (
                    f"{seq!r}, group {group}: {table} should be 0 before entry {first}, and only there"
                )
                end = sequence.num_computed
                if sequence.restore is not None:
                    end = max(end, sequence.restore.end * self.block_size)
                seen = first_seen(end, self.windows[group], self.block_size)
                assert first == max(len(sequence.cold), seen)
                for block in table[first:]:
                    refs[block] += 1
            for held in sequence.held.values():
                for block in held:
                    refs[block] += 1
        for block in range(1, self._pool.most + 1):
            assert refs[block] == self._pool.refs(block), (
                f"block {block} has {self._pool.refs(block)} references, {refs[block]} holders"
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
        nodes: list[Node] = []
        limit = (len(tokens) - 1) // self.block_size
        for node in self._tree.walk(tokens, self.block_size, salt):
            if len(nodes) == limit:
                break
            nodes.append(node)
        return nodes[: usable_blocks([node.blocks for node in nodes], self.windows, self.block_size)]

    def _start(self, seq: str, blocks: Sequence[Sequence[int | None]]) -> SequenceBlocks:
        """A new sequence that holds these complete blocks, of a window group only what the next position sees."""
        computed = len(blocks) * self.block_size
        first = [first_seen(computed, window, self.block_size) for window in self.windows]
        tables: list[list[int]] = [[0] * len(blocks) for _ in self.windows]
        for group, table in enumerate(tables):
            for i in range(first[group], len(blocks)):
                block = blocks[i][group]
                assert block is not None
                self._tree.ref(block)
                table[i] = block
        self._live[seq] = sequence = SequenceBlocks(tables, first, computed, len(blocks))
        return sequence

    def _make_room(self, blocks: int, urgent: bool = True) -> bool:
        if self.num_free < blocks:
            return False
        if self._spiller is not None:
            return self._spiller.make_room(blocks, urgent)
        while self._pool.free < blocks:
            if not self._tree.evict():
                return False  # what is left lies above a block in flight
        return True
