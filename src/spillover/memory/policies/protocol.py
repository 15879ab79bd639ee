"""What a policy is told and asked."""

from collections.abc import Sequence
from typing import Protocol


class EvictionPolicy(Protocol):
    def on_access(self, blocks: Sequence[int]) -> None:
        """Note that a sequence has just taken the blocks or let go of them, in this order."""

    def on_insert(self, block: int) -> None:
        """Note that the block may be evicted from now on."""

    def on_remove(self, block: int) -> None:
        """Note that the block may no longer be evicted: it is in use again, or gone."""

    def victim(self) -> int | None:
        """Return which of the blocks that may be evicted should go next; asking changes nothing."""

    def goes_first(self, block: int) -> bool:
        """Return whether a block that may not be evicted yet would be the victim if it might; changes nothing."""
