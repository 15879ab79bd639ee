"""Whether the last tier has a block, so that it need not be offered to it again.

Blocks are written to every tier below host memory, and the last of them is the one that keeps what the others let go.
A disk knows at once what it has. A remote store may evict, expire or forget blocks without a word, so what it is
believed to have is asked again after every use of the block: in batches, on the tier's own thread. A block that the
tier did not take, when it was offered after its last use, is not offered again before the next.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from spillover.memory.tiers.base import Ticket, Tier

KNOWN_KEYS = 1 << 20  # keys remembered
ASKED_AT_ONCE = 512  # keys


class Below:
    def __init__(self, tiers: Sequence[Tier], found: Callable[[bytes, bool], None]) -> None:
        """Ask a tier. `found` is told of each block that the tier was asked for, and whether it has it."""
        self.tier = tiers[-1] if tiers else None
        self._found = found
        self._offered: OrderedDict[bytes, bool] = OrderedDict()  # since its last use -> whether the tier has it
        self._doubted: OrderedDict[bytes, None] = OrderedDict()  # to be asked for
        self._asking: tuple[list[bytes], Ticket[list[bool]]] | None = None

    def settled(self, key: bytes) -> bool:
        """Return whether the tier has the block, or was offered it since its last use."""
        return key in self._offered or self.has(key)

    def has(self, key: bytes, tier: Tier | None = None) -> bool:
        """Return whether the last tier, or this one, has the block, as far as can be said at once."""
        tier = tier or self.tier
        known = tier.has(key) if tier is not None else False
        return known if known is not None else tier is self.tier and self._offered.get(key, False)

    def doubted(self, key: bytes) -> bool:
        """Return whether the tier is being asked, so that it will soon be known."""
        return key in self._doubted

    def answered(self, tier: Tier, key: bytes, there: bool) -> None:
        """Note that a tier was asked for the block, or loaded it, or failed to."""
        if there:
            self.offered(tier, key, True)
        elif tier is self.tier:
            self._offered.pop(key, None)

    def offered(self, tier: Tier, key: bytes, taken: bool) -> None:
        if tier is self.tier:
            self._doubted.pop(key, None)
            self._offered[key] = taken
            if len(self._offered) > KNOWN_KEYS:
                self._offered.popitem(last=False)

    def used(self, key: bytes) -> None:
        """Forget what was known of the block before this use."""
        if self._offered.pop(key, False):
            self.ask(key)

    def ask(self, key: bytes) -> None:
        if self.tier is not None and key not in self._offered and self.tier.has(key) is None:
            self._doubted[key] = None

    @property
    def busy(self) -> bool:
        return bool(self._doubted)

    def poll(self) -> None:
        if self._asking is not None:
            keys, ticket = self._asking
            if ticket.expired(time.monotonic()):
                ticket.cancel()
            elif not ticket.done():
                return
            self._asking = None
            there = ticket.result() or [False] * len(keys)
            for key, found in zip(keys, there, strict=True):
                if key in self._doubted:  # else it was written meanwhile
                    del self._doubted[key]
                    if found:
                        self._offered[key] = True
                    self._found(key, found)
        if self._doubted and self.tier is not None:
            keys = [key for key, _ in zip(self._doubted, range(ASKED_AT_ONCE), strict=False)]
            self._asking = (keys, self.tier.lookup(keys))

    def clear(self) -> None:
        self._offered.clear()
        self._doubted.clear()
