"""The interface of an eviction policy."""

from collections.abc import Sequence
from typing import Protocol


class EvictionPolicy(Protocol):
    def on_access(self, blocks: Sequence[int]) -> None:
        """Note that a sequence has just acquired or released these blocks, in this order."""

    def on_insert(self, block: int) -> None:
        """Note that the block may be evicted from now on."""

    def on_remove(self, block: int) -> None:
        """Note that the block may no longer be evicted, because it is in use again or has left the prefix tree."""

    def victim(self) -> int | None:
        """Return the evictable block that should be evicted next, None if there is none; this changes nothing."""

    def is_next_victim(self, block: int) -> bool:
        """Return whether a block that is not evictable yet would be the victim if it were; this changes nothing."""
