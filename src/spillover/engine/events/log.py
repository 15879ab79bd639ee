"""Records, on the engine's thread, which blocks each tier gains and loses, for the publisher's thread."""

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
    parent: bytes | None = None  # digest of the previous block; None if it is the first block, or if unknown
    tokens: bytes = b""  # packed token ids; empty if unknown
    salted: str | None = None  # for the first block of a salted prompt, the digest of model and salt in hex


class Removed(NamedTuple):
    medium: str
    digest: bytes
    group: int


Record = Stored | Removed


class KVEventLog:
    """A listener to the prefix tree and the lower tiers. One thread appends records, another removes them."""

    def __init__(self, tree: PrefixTree) -> None:
        self.records: deque[Record] = deque()
        self._tree = tree
        self._blocks: dict[int, tuple[bytes, int]] = {}  # block of the device -> digest and layer group

    # Called by the prefix tree

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

    # Called by the lower tiers

    def stored(self, tier: str, key: bytes) -> None:
        self.records.append(Stored(MEDIUM[tier], key[:-1], key[-1]))

    def removed(self, tier: str, key: bytes) -> None:
        self.records.append(Removed(MEDIUM[tier], key[:-1], key[-1]))
