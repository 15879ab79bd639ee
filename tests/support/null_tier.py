"""A tier that accepts every block and stores none: it measures the cost of a tier without its benefit."""

from collections.abc import Sequence

from spillover.memory.tiers.base import Ticket, TierStats


class NullTier:
    def __init__(self, name: str = "disk") -> None:
        self.name = name
        self._stores = self._bytes_written = 0

    def lookup(self, keys: Sequence[bytes]) -> Ticket[list[bool]]:
        return Ticket.ended([False] * len(keys))

    def has(self, key: bytes) -> bool:
        return False

    def store(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Ticket[bool]]:
        self._stores += len(items)
        self._bytes_written += sum(payload.nbytes for _, payload in items)
        return [Ticket.ended(True) for _ in items]

    def load(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Ticket[bool]]:
        return [Ticket.ended(False) for _ in items]

    def evict(self, count: int) -> Ticket[int]:
        return Ticket.ended(0)

    def poll(self) -> None: ...

    def clear(self) -> None: ...

    def stats(self) -> TierStats:
        return TierStats(stores=self._stores, bytes_written=self._bytes_written)

    def close(self, deadline: float) -> None: ...
