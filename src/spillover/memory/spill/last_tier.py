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
LOOKUP_KEYS = 512  # maximum number of keys of one lookup


class LastTier:
    def __init__(self, tiers: Sequence[Tier], found: Callable[[bytes, bool], None]) -> None:
        """Track the last tier. `found` is called for each block looked up in it, with whether the tier has it."""
        self.tier = tiers[-1] if tiers else None
        self._found = found
        self._offered: OrderedDict[bytes, bool] = OrderedDict()  # key offered since its last use -> tier has it
        self._pending_keys: OrderedDict[bytes, None] = OrderedDict()  # keys to look up
        self._lookup: tuple[list[bytes], Ticket[list[bool]]] | None = None

    def settled(self, key: bytes) -> bool:
        """Return whether the tier has the block, or was offered it since the block's last use."""
        return key in self._offered or self.has(key)

    def has(self, key: bytes, tier: Tier | None = None) -> bool:
        """Return whether the last tier, or the given one, is known to have the block."""
        tier = tier or self.tier
        known = tier.has(key) if tier is not None else False
        return known if known is not None else tier is self.tier and self._offered.get(key, False)

    def lookup_pending(self, key: bytes) -> bool:
        """Return whether a lookup of the block is pending, so that its presence will soon be known."""
        return key in self._pending_keys

    def note_result(self, tier: Tier, key: bytes, present: bool) -> None:
        """Note the result of a lookup or load of the block in a tier: whether the block was there."""
        if present:
            self.note_offer(tier, key, True)
        elif tier is self.tier:
            self._offered.pop(key, None)

    def note_offer(self, tier: Tier, key: bytes, accepted: bool) -> None:
        if tier is self.tier:
            self._pending_keys.pop(key, None)
            self._offered[key] = accepted
            if len(self._offered) > KNOWN_KEYS:
                self._offered.popitem(last=False)

    def note_use(self, key: bytes) -> None:
        """Forget what was known before this use of the block, and look it up again if the tier had it."""
        if self._offered.pop(key, False):
            self.request_lookup(key)

    def request_lookup(self, key: bytes) -> None:
        if self.tier is not None and key not in self._offered and self.tier.has(key) is None:
            self._pending_keys[key] = None

    @property
    def busy(self) -> bool:
        return bool(self._pending_keys)

    def poll(self) -> None:
        if self._lookup is not None:
            keys, ticket = self._lookup
            if ticket.expired(time.monotonic()):
                ticket.cancel()
            elif not ticket.done():
                return
            self._lookup = None
            results = ticket.result() or [False] * len(keys)
            for key, found in zip(keys, results, strict=True):
                if key in self._pending_keys:  # otherwise it was written since the lookup
                    del self._pending_keys[key]
                    if found:
                        self._offered[key] = True
                    self._found(key, found)
        if self._pending_keys and self.tier is not None:
            keys = [key for key, _ in zip(self._pending_keys, range(LOOKUP_KEYS), strict=False)]
            self._lookup = (keys, self.tier.lookup(keys))

    def clear(self) -> None:
        self._offered.clear()
        self._pending_keys.clear()
