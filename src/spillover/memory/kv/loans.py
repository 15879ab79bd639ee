"""Additional KV blocks, in memory that a lender such as the expert slots can spare for a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from spillover.memory.kv.blocks import EVICTABLE, FREE, BlockPool
from spillover.memory.kv.prefix_tree import PrefixTree

SPARE = 4  # at least 1/SPARE of all blocks is borrowed at a time


class BlockLender(Protocol):
    """An owner of memory that can hold KV blocks."""

    def lend(self, blocks: int) -> list[Sequence[int]]:
        """Lend at least n blocks if possible, as loans that are returned one by one; fewer or none if not."""
        ...

    def return_loan(self, loan: Sequence[int]) -> None: ...


class Loans:
    def __init__(self, pool: BlockPool, tree: PrefixTree, lender: BlockLender | None,
                 can_evict: Callable[[Sequence[int]], bool]) -> None:
        """Borrow from a lender. `can_evict`: returns whether blocks of the tree can be evicted now; starts copies."""
        self.lender = lender
        self._can_evict = can_evict
        self._pool = pool
        self._tree = tree
        self._taken: list[Sequence[int]] = []

    @property
    def blocks(self) -> int:
        """Return the number of blocks on loan now."""
        return sum(len(loan) for loan in self._taken)

    def grow(self, blocks: int) -> bool:
        """Borrow n more blocks, and some to spare, if there is a lender; return whether any were lent. Lending requires
        a scan of all that the lender has left, which should not happen at every step."""
        more = max(blocks, self._pool.num_blocks // SPARE)
        loans = self.lender.lend(more) if self.lender is not None and blocks > 0 else []
        for loan in loans:
            self._pool.add(loan)
        self._taken += loans
        return bool(loans)

    def shrink(self) -> bool:
        """Return one loan to the lender if half of the remaining blocks are then free or evictable: with no running
        request every loan is returned. Its prefixes are evicted; if a lower tier must store them first, the result is
        False until it has, and the caller has to retry."""
        for loan in self._taken:
            free = self._pool.free + self._pool.evictable
            if 2 * (free - len(loan)) < self._pool.num_blocks - len(loan):
                continue
            if self._emptied([block for block in loan if self._pool.state(block) is not FREE]):
                assert self.lender is not None
                self._pool.remove(set(loan))
                self._taken.remove(loan)
                self.lender.return_loan(loan)
                return True
        return False

    def _emptied(self, kept: Sequence[int]) -> bool:
        if not all(self._pool.cached(block) for block in kept):
            return False
        dropped = self._tree.below(kept)
        if any(self._pool.state(block) is not EVICTABLE for block in dropped) or not self._can_evict(dropped):
            return False
        return all(self._pool.state(block) is FREE or self._tree.drop(block) for block in kept)
