"""A record of whether the last tier has a block, so that the block need not be offered to it again.

Blocks are written to every tier below host memory; the last of these keeps blocks that the others evict. A disk knows
at once what it has. A remote store may evict, expire or lose blocks without notice, so a block believed to be in it is
looked up again after every use of the block: in batches, on the tier's thread. A block that the tier rejected when
offered after the block's last use is not offered again before its next use.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from spillover.memory.tiers.base import Ticket, Tier

KNOWN_KEYS = 1 << 20  # maximum number of keys remembered
ASKED_AT_ONCE = 512  # maximum number of keys of one lookup


class Below:
    def __init__(self, tiers: Sequence[Tier], found: Callable[[bytes, bool], None]) -> None:
        """Track the last tier. `found` is called for each block looked up in it, with whether the tier has it."""
        self.tier = tiers[-1] if tiers else None
        self._found = found
        self._offered: OrderedDict[bytes, bool] = OrderedDict()  # key offered since its last use -> tier has it
        self._doubted: OrderedDict[bytes, None] = OrderedDict()  # keys to look up
        self._asking: tuple[list[bytes], Ticket[list[bool]]] | None = None

    def settled(self, key: bytes) -> bool:
        """Return whether the tier has the block, or was offered it since the block's last use."""
        return key in self._offered or self.has(key)

    def has(self, key: bytes, tier: Tier | None = None) -> bool:
        """Return whether the last tier, or the given one, is known to have the block."""
        tier = tier or self.tier
        known = tier.has(key) if tier is not None else False
        return known if known is not None else tier is self.tier and self._offered.get(key, False)

    def doubted(self, key: bytes) -> bool:
        """Return whether a lookup of the block is pending, so that its presence will soon be known."""
        return key in self._doubted

    def answered(self, tier: Tier, key: bytes, there: bool) -> None:
        """Note the result of a lookup or load of the block in a tier: whether the block was there."""
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
        """Forget what was known before this use of the block, and look it up again if the tier had it."""
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
                if key in self._doubted:  # otherwise it was written since the lookup
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
