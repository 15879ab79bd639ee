"""Blocks beyond the cache's own, in bytes that somebody else can spare for a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from spillover.memory.kv.blocks import EVICTABLE, FREE, BlockPool
from spillover.memory.kv.prefix_tree import PrefixTree

SPARE = 4  # a loan is at least 1/n of all blocks


class BlockLender(Protocol):
    """Anything that has bytes in which blocks can lie."""

    def lend(self, blocks: int) -> list[Sequence[int]]:
        """Lend at least n blocks if it can, in loans that come back one by one; fewer or none if it cannot."""
        ...

    def give_back(self, loan: Sequence[int]) -> None: ...


class Loans:
    def __init__(self, pool: BlockPool, tree: PrefixTree, lender: BlockLender | None,
                 may_go: Callable[[Sequence[int]], bool]) -> None:
        """Borrow from a lender. `may_go`: whether blocks of the tree may be forgotten now; if not, copies begin."""
        self.lender = lender
        self._may_go = may_go
        self._pool = pool
        self._tree = tree
        self._taken: list[Sequence[int]] = []

    @property
    def blocks(self) -> int:
        """Return the number of blocks on loan now."""
        return sum(len(loan) for loan in self._taken)

    def grow(self, blocks: int) -> bool:
        """Borrow n more blocks if somebody lends them, and some to spare: whoever lends has to look at all it has left,
        and should not have to at every step. Whether any came."""
        more = max(blocks, self._pool.num_blocks // SPARE)
        loans = self.lender.lend(more) if self.lender is not None and blocks > 0 else []
        for loan in loans:
            self._pool.add(loan)
        self._taken += loans
        return bool(loans)

    def shrink(self) -> bool:
        """Give one loan back where half of the blocks that stay are free: with nobody running, all go back, however
        large. Prefixes in it are forgotten, once a tier below has them where there is one: until then False, and it is
        to be asked again."""
        for loan in self._taken:
            free = self._pool.free + self._pool.evictable
            if 2 * (free - len(loan)) < self._pool.num_blocks - len(loan):
                continue
            if self._emptied([block for block in loan if self._pool.state(block) is not FREE]):
                assert self.lender is not None
                self._pool.remove(set(loan))
                self._taken.remove(loan)
                self.lender.give_back(loan)
                return True
        return False

    def _emptied(self, kept: Sequence[int]) -> bool:
        if not all(self._pool.cached(block) for block in kept):
            return False
        goes = self._tree.below(kept)
        if any(self._pool.state(block) is not EVICTABLE for block in goes) or not self._may_go(goes):
            return False
        return all(self._pool.state(block) is FREE or self._tree.drop(block) for block in kept)
