"""The prefix tree: which computed blocks hold which tokens, and which of them may be evicted.

A node is one block's span of tokens and has one block id per layer group. Full-attention blocks are evicted leaf by
leaf, so that every node stays reachable; a sliding-window group's block may be evicted alone, which leaves None.
Invariant: a sequence that holds a node's full-attention blocks holds those of all its ancestors too. So every evictable
block can be evicted, and free + evictable is accurate, except for ancestors of a block in flight until its copy ends.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from spillover.memory.kv.blocks import EVICTABLE, BlockPool
from spillover.memory.kv.digest import block_digest, block_key, root_digest
from spillover.memory.policies import EvictionPolicy


class Node:
    __slots__ = ("_digest", "_key", "blocks", "children", "parent", "tokens", "users")

    def __init__(self, parent: "Node | None", tokens: bytes, blocks: list[int | None]) -> None:
        self.parent = parent
        self.tokens = tokens  # the node's token ids, packed
        self.blocks = blocks  # one block id per layer group; None if the group's block is not in the tree
        self.children: dict[bytes, Node] = {}
        self.users = 0  # number of live sequences whose last committed block this is; keeps the node, not its blocks
        self._digest: bytes | None = None
        self._key: bytes | None = None

    def key(self, group: int) -> bytes:
        """Return the key under which other tiers store the node's block of a group; the first group's is cached."""
        if group:
            return block_key(self.digest, group)
        if self._key is None:
            self._key = block_key(self.digest, 0)
        return self._key

    @property
    def digest(self) -> bytes:
        """Return the digest, computed on first use: without other tiers, which need keys, nothing is digested."""
        chain: list[Node] = []
        node = self
        while (digest := node._digest) is None:
            assert node.parent is not None, "a root has its digest from the start"
            chain.append(node)
            node = node.parent
        for link in reversed(chain):
            link._digest = digest = block_digest(digest, link.tokens)
        return digest


class Root(Node):
    __slots__ = ("salt",)

    def __init__(self, identity: bytes, salt: str | None) -> None:
        super().__init__(None, b"", [])
        self.salt = salt
        self._digest = root_digest(identity, salt)


class Listener(Protocol):
    """An observer of the tree's blocks, such as the spiller or the publisher of KV events."""

    def on_cached(self, blocks: Sequence[int]) -> None: ...  # the blocks entered the tree; their sequence holds them

    def on_idle(self, blocks: Sequence[int]) -> None: ...  # no sequence holds the blocks any more

    def on_busy(self, blocks: Sequence[int]) -> None: ...  # the blocks are held by a sequence, or in flight

    def on_gone(self, blocks: Sequence[int]) -> None: ...  # the blocks left the tree


class Evictor(Protocol):
    """An evictor of blocks of the tree: the tree itself, or the spiller, which copies them to other tiers first."""

    def ensure_free(self, blocks: int, urgent: bool) -> bool:
        """Evict until n blocks are free; False if that is not possible, or should wait for copies."""

    def can_evict(self, blocks: Sequence[int]) -> bool:
        """Return whether these unreferenced blocks may leave the device without another copy to a lower tier."""


class PrefixTree:
    """The tree of cached blocks. All references to blocks, cached or not, go through it: the policy sees each use."""

    def __init__(
        self, pool: BlockPool, windows: Sequence[int | None], policy: EvictionPolicy, identity: bytes = b""
    ) -> None:
        self.num_nodes = 0  # number of nodes, without roots
        self.num_evictions = 0  # number of evicted blocks
        self.listeners: list[Listener] = []
        self._pool = pool
        self._windows = tuple(windows)
        # A node is evicted as a whole; the block of its first full-attention group represents it in the policy.
        self._lead = self._windows.index(None) if None in self._windows else None
        self._plain = self._windows == (None,)  # one group with full attention, as in most models: a node is one block
        self._policy = policy
        self._identity = identity
        self._roots: dict[str | None, Root] = {}
        self._home: dict[int, Node] = {}  # block in the tree -> its node
        self._offered: set[int] = set()  # blocks that the policy may choose as victims

    def root(self, salt: str | None) -> Node:
        """Return the root of this salt: sequences with different salts never share a block."""
        if salt not in self._roots:
            self._roots[salt] = Root(self._identity, salt)
        return self._roots[salt]

    def walk(self, tokens: bytes, width: int, salt: str | None) -> list[Node]:
        """Return the nodes along packed `tokens`, `width` bytes each, up to the first missing one; changes nothing."""
        nodes: list[Node] = []
        node: Node | None = self._roots.get(salt)
        if node is None:
            return nodes
        for end in range(width, len(tokens) + 1, width):
            node = node.children.get(tokens[end - width : end])
            if node is None:
                break
            nodes.append(node)
        return nodes

    def path(self, node: Node) -> list[Node]:
        """Return the path from the root, included, to the node."""
        nodes = [node]
        while node.parent is not None:
            node = node.parent
            nodes.append(node)
        return nodes[::-1]

    def insert(self, parent: Node, tokens: bytes, tables: Sequence[Sequence[int]]) -> tuple[Node, dict[int, list[int]]]:
        """Insert a sequence's READY blocks after `parent`, one table per layer group with 0 for missing blocks; return
        the last node, and by index the blocks of the tree that the sequence now references *in addition*.

        If a node exists already (two sequences computed the same tokens at once), the sequence keeps its own blocks
        outside the tree, because its table points at them; they fill gaps of the node. The sequence takes references
        on the node's full-attention blocks, so that its later blocks are never below evictable ones.
        """
        width = len(tokens) // len(tables[0])
        node, known = parent, [parent]  # nodes that existed before
        new: Sequence[int]
        cached: list[int] = []  # blocks that enter the tree
        held: dict[int, list[int]] = {}
        for index, blocks in enumerate(zip(*tables, strict=True)):
            span = tokens[index * width : (index + 1) * width]
            child = node.children.get(span)
            if child is None:
                whole = 0 not in blocks
                child = Node(node, span, list(blocks) if whole else [block or None for block in blocks])
                node.children[span] = child
                self.num_nodes += 1
                new = blocks if whole else [block for block in blocks if block]
            else:
                known.append(child)
                new, duplicates = self._fill(child, blocks)
                if duplicates:
                    held[index] = duplicates
            for block in new:
                self._home[block] = child
            cached += new
            node = child
        self._pool.cache(cached)
        for blocks_held in held.values():
            self.ref(blocks_held)
        for listener in self.listeners:
            listener.on_cached(cached)
        for each in known:
            self._offer(each)
        return node, held

    def _fill(self, node: Node, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Fill gaps of a node; return the blocks used, and the node's existing full-attention blocks for the others."""
        new, duplicates = [], []
        for group, block in enumerate(blocks):
            existing = node.blocks[group]
            if block and existing is None:
                node.blocks[group] = block
                new.append(block)
            elif block and existing is not None and self._windows[group] is None:
                duplicates.append(existing)
        return new, duplicates

    def key(self, block: int) -> bytes:
        """Return the key under which other tiers store this block of the tree."""
        node = self._home[block]
        return node.key(0 if self._plain else node.blocks.index(block))

    def home(self, block: int) -> tuple[Node, int]:
        """Return the node of a block of the tree, and the index of the block's layer group."""
        node = self._home[block]
        return node, 0 if self._plain else node.blocks.index(block)

    def ensure_free(self, blocks: int, urgent: bool) -> bool:
        """Evict until n blocks are free; False if all remaining evictable blocks are ancestors of blocks in flight."""
        return self.evict(blocks)

    def can_evict(self, blocks: Sequence[int]) -> bool:
        return True

    def enter(self, node: Node) -> None:
        """Note that this node's block is now the last committed block of one more sequence."""
        node.users += 1

    def leave(self, node: Node) -> None:
        node.users -= 1
        self._prune(node)

    def ref(self, blocks: Sequence[int]) -> None:
        self._pool.ref(blocks)
        self._used(blocks)

    def unref(self, blocks: Sequence[int]) -> None:
        self._pool.unref(blocks)
        self._used(blocks)

    def begin_copy(self, blocks: Sequence[int]) -> None:
        self._pool.begin_copy(blocks)
        self._offer_nodes(blocks)

    def end_copy(self, blocks: Sequence[int]) -> None:
        self._pool.end_copy(blocks)
        self._offer_nodes(blocks)

    def evict(self, wanted: int, can_evict: Callable[[Sequence[int]], bool] | None = None) -> bool:
        """Evict the policy's victims, each a whole leaf or one sliding-window block, until n blocks are free; False if
        there are no victims left before that, or if `can_evict` refuses one."""
        gone: list[int] = []
        short = wanted - self._pool.free
        evict = self._evict_chain if self._plain else self._evict_node
        while len(gone) < short and (victim := self._policy.victim()) is not None:
            evicted = evict(victim, short - len(gone), can_evict)
            if not evicted:
                break
            gone += evicted
        self._free(gone)
        return len(gone) >= short

    def _evict_node(self, victim: int, most: int, can_evict: Callable[[Sequence[int]], bool] | None) -> list[int]:
        """Remove a leaf, or one sliding-window block, from the tree; return its blocks, none if `can_evict` refuses."""
        node = self._home[victim]
        whole = self._lead is not None and node.blocks[self._lead] == victim
        evicted = [block for block in node.blocks if block is not None] if whole else [victim]
        if can_evict is not None and not can_evict(evicted):
            return []
        self._remove(node, evicted)
        return evicted

    def _evict_chain(self, victim: int, most: int, can_evict: Callable[[Sequence[int]], bool] | None) -> list[int]:
        """Remove a leaf of a plain tree, then its ancestors while they would be the next victims, up to `most` blocks;
        return the blocks removed before `can_evict` refused one."""
        home, is_next_victim, gone = self._home, self._policy.is_next_victim, list[int]()
        node, block = home[victim], victim
        while can_evict is None or can_evict((block,)):
            gone.append(block)
            del home[block]
            node.blocks[0] = None
            self._withdraw(block)
            if len(gone) == most or node.users or node.parent is None or not node.parent.blocks:
                break
            del node.parent.children[node.tokens]
            self.num_nodes -= 1
            node = node.parent
            above = node.blocks[0]
            if above is None or node.children or self._pool.state(above) is not EVICTABLE or not is_next_victim(above):
                break
            block = above
        self._prune(node)
        return gone

    def below(self, blocks: Sequence[int]) -> list[int]:
        """Return the blocks that leave the tree when these are dropped: those of their nodes and of all descendants."""
        nodes = list(dict.fromkeys(self._home[block] for block in blocks))
        found = dict.fromkeys(nodes)
        for node in nodes:
            for child in node.children.values():
                if child not in found:
                    found[child] = None
                    nodes.append(child)
        return [block for node in nodes for block in node.blocks if block is not None]

    def drop(self, block: int) -> bool:
        """Evict the node of a block and all its descendants; False, with nothing changed, if any of them is in use."""
        below = [self._home[block]]
        for node in below:
            below += node.children.values()
        if any(self._pool.state(each) is not EVICTABLE for node in below for each in node.blocks if each is not None):
            return False
        gone: list[int] = []
        for node in reversed(below):  # descendants first, so that a node has no children left
            evicted = [each for each in node.blocks if each is not None]
            gone += evicted
            self._remove(node, evicted)
        self._free(gone)
        return True

    def reset(self) -> None:
        """Forget every prefix. Blocks in use stay allocated and are freed when their last reference is dropped."""
        self._pool.uncache(self._home)
        for block in list(self._offered):
            self._withdraw(block)
        for listener in self.listeners:
            listener.on_gone(list(self._home))
        self._home.clear()
        self._roots.clear()
        self.num_nodes = 0

    def check(self) -> None:
        found: dict[int, Node] = {}
        nodes = 0
        pending: list[Node] = list(self._roots.values())
        for root in pending:
            assert root.children or root.users, "an empty root stayed"
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            if node.parent is None:
                continue
            nodes += 1
            assert node.parent.children[node.tokens] is node
            assert node.children or node.users or any(node.blocks), "an empty leaf stayed"
            self._check_node(node, found)
        assert nodes == self.num_nodes, f"{nodes} nodes, {self.num_nodes} counted"
        assert found == self._home
        assert set(found) == {block for block in range(1, self._pool.most + 1) if self._pool.cached(block)}
        assert self._offered <= set(found)

    def _check_node(self, node: Node, found: dict[int, Node]) -> None:
        blocks = [block for block in node.blocks if block is not None]
        idle = all(self._pool.state(block) is EVICTABLE for block in blocks)
        for group, block in enumerate(node.blocks):
            if block is None:
                assert self._windows[group] is not None, "a full-attention block left the tree before its node"
                continue
            assert block not in found, f"block {block} is in the tree twice"
            found[block] = node
            if self._windows[group] is not None:
                assert (block in self._offered) == (self._pool.state(block) is EVICTABLE)
            else:
                assert (block in self._offered) == (group == self._lead and idle and not node.children)
                above = node.parent.blocks[group] if node.parent is not None and node.parent.blocks else None
                if self._pool.refs(block) and above is not None:
                    assert self._pool.refs(above), f"block {block} is held, but {above} before it is not"

    def _used(self, blocks: Sequence[int]) -> None:
        inside = [block for block in blocks if block in self._home]
        if not inside:
            return
        self._policy.on_access(inside)
        self._offer_nodes(inside)
        for listener in self.listeners:
            idle = [block for block in inside if self._pool.state(block) is EVICTABLE]
            if idle:
                listener.on_idle(idle)
            if len(idle) < len(inside):
                listener.on_busy([block for block in inside if self._pool.state(block) is not EVICTABLE])

    def _offer_nodes(self, blocks: Sequence[int]) -> None:
        """Update what the policy may evict of these blocks' nodes; in a plain tree only leaves can have changed."""
        for node in map(self._home.get, blocks):
            if node is not None and not (self._plain and node.children):
                self._offer(node)

    def _offer(self, node: Node) -> None:
        """Report to the policy which blocks of this node may be evicted now, and which no longer."""
        if self._plain:
            if node.blocks and (block := node.blocks[0]) is not None:
                self._set_offered(block, not node.children and self._pool.state(block) is EVICTABLE)
            return
        idle = True
        for window, block in zip(self._windows, node.blocks, strict=False):  # a root has no blocks
            if block is None:
                continue
            evictable = self._pool.state(block) is EVICTABLE
            idle = idle and evictable
            if window is not None:
                self._set_offered(block, evictable)
        if self._lead is not None and node.blocks and (lead := node.blocks[self._lead]) is not None:
            self._set_offered(lead, idle and not node.children)

    def _set_offered(self, block: int, evictable: bool) -> None:
        if not evictable:
            self._withdraw(block)
        elif block not in self._offered:
            self._offered.add(block)
            self._policy.on_insert(block)

    def _withdraw(self, block: int) -> None:
        if block in self._offered:
            self._offered.remove(block)
            self._policy.on_remove(block)

    def _remove(self, node: Node, evicted: Sequence[int]) -> None:
        """Remove blocks from a node, and the node from the tree if it is then unused."""
        for block in evicted:
            node.blocks[node.blocks.index(block)] = None
            del self._home[block]
            self._withdraw(block)
        self._prune(node)

    def _free(self, gone: Sequence[int]) -> None:
        """Free blocks that have been removed from their nodes."""
        if gone:
            self._pool.evict(gone)
            self.num_evictions += len(gone)
            for listener in self.listeners:
                listener.on_gone(gone)

    def _prune(self, node: Node) -> None:
        """Remove the node, and then its ancestors, as long as they have no children, users or blocks."""
        while not (node.children or node.users or any(node.blocks)):
            if isinstance(node, Root):
                del self._roots[node.salt]
                return
            assert node.parent is not None
            del node.parent.children[node.tokens]
            self.num_nodes -= 1
            node = node.parent
        self._offer(node)
