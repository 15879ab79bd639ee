"""Notes what comes to and goes from each tier, on the engine's thread, for the publisher to take."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from spillover.memory.kv.event_wire import CPU, GPU, STORAGE
from spillover.memory.kv.prefix_tree import PrefixTree, Root

MEDIUM = {"host": CPU, "disk": STORAGE}


class Stored(NamedTuple):
    medium: str
    digest: bytes
    group: int
    parent: bytes | None = None  # digest of the block before it; None: it is the first, or nothing is known
    tokens: bytes = b""  # packed; empty: not known
    salted: str | None = None  # of the first block of a salted prompt: digest of model and salt, in hex


class Removed(NamedTuple):
    medium: str
    digest: bytes
    group: int


Record = Stored | Removed


class KVEventLog:
    """A listener to the prefix tree and to the tiers below it. One thread appends records, another takes them."""

    def __init__(self, tree: PrefixTree) -> None:
        self.records: deque[Record] = deque()
        self._tree = tree
        self._blocks: dict[int, tuple[bytes, int]] = {}  # on the device -> digest and layer group

    # What the tree tells

    def on_cached(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            node, group = self._tree.home(block)
            before, digest = node.parent, node.digest
            parent = salted = None
            if not isinstance(before, Root):
                assert before is not None
                parent = before.digest
            elif before.salt is not None:
                salted = before.digest[:16].hex()
            self._blocks[block] = digest, group
            self.records.append(Stored(GPU, digest, group, parent, node.tokens, salted))

    def on_idle(self, blocks: Sequence[int]) -> None:
        """Do nothing: the blocks are where they were."""

    def on_busy(self, blocks: Sequence[int]) -> None:
        """Do nothing: the blocks are where they were."""

    def on_gone(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.records.append(Removed(GPU, *self._blocks.pop(block)))

    # What the tiers below tell

    def stored(self, tier: str, key: bytes) -> None:
        self.records.append(Stored(MEDIUM[tier], key[:-1], key[-1]))

    def removed(self, tier: str, key: bytes) -> None:
        self.records.append(Removed(MEDIUM[tier], key[:-1], key[-1]))
