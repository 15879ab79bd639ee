"""Lets the first of several prompts with a common prefix compute it, while the others wait until it has.

An engine shares KV blocks that are computed, not those being computed: prompts with a common prefix that are sent
together would each compute it. The gate admits the first and holds the others until its first token. It identifies
blocks by hashes of all tokens up to their end, and learns only from the prompts that pass it; if it is wrong (a block
was evicted, or another client computed it), a prefix is computed twice or one wait is unnecessary.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from spillover.programs.lifetime import Lifetime

MOST_BLOCKS = 1 << 16  # maximum number remembered, least recently used forgotten first
CANCEL_CHECK_SECONDS = 0.2  # between two checks whether the run was cancelled


class PrefixGate:
    def __init__(self, block_size: int = 16) -> None:
        self.block_size = block_size
        self._ready: OrderedDict[int, None] = OrderedDict()
        self._computing: set[int] = set()
        self._changed = threading.Condition()

    def cold(self, ids: Sequence[int]) -> int:
        """Return the number of a prompt's tokens in whole blocks that are not known to be computed."""
        blocks = self._blocks(ids)
        with self._changed:
            return (len(blocks) - self._warm(blocks)) * self.block_size

    @contextmanager
    def passing(self, ids: Sequence[int], lifetime: Lifetime,
                usable: int | None = None) -> Iterator[Callable[[], None]]:
        """Wait until no block that this prompt could use is being computed, then claim its own until computed.

        Yields a function to call when they are. `usable` is the number of the prompt's tokens that a cache may provide.
        """
        blocks = self._blocks(ids)
        reusable = min(len(ids) - 1 if usable is None else usable, len(ids) - 1) // self.block_size
        with self._changed:
            while True:
                warm = self._warm(blocks)
                if warm >= reusable or blocks[warm] not in self._computing:
                    break
                self._changed.wait(min(CANCEL_CHECK_SECONDS, lifetime.remaining()))
            lifetime.remaining()
            own = [block for block in blocks[warm:] if block not in self._computing]
            self._computing.update(own)
        done = False

        def computed() -> None:
            nonlocal done
            if not done:
                done = True
                self._finish(own, blocks)

        try:
            yield computed
        finally:
            if not done:
                self._finish(own, [])

    def note(self, ids: Sequence[int]) -> None:
        """Record that the KV of these tokens is cached: a prompt and its answer without the last token."""
        blocks = self._blocks(ids)
        with self._changed:
            self._remember(blocks)

    def forget(self) -> None:
        """Forget all blocks, because the cache was emptied."""
        with self._changed:
            self._ready.clear()

    def _finish(self, own: Sequence[int], ready: Sequence[int]) -> None:
        with self._changed:
            self._computing.difference_update(own)
            self._remember(ready)
            self._changed.notify_all()

    def _remember(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._ready[block] = None
            self._ready.move_to_end(block)
        while len(self._ready) > MOST_BLOCKS:
            self._ready.popitem(last=False)

    def _warm(self, blocks: Sequence[int]) -> int:
        """Return the number of leading blocks that are computed."""
        return next((index for index, block in enumerate(blocks) if block not in self._ready), len(blocks))

    def _blocks(self, ids: Sequence[int]) -> list[int]:
        """Return a hash for each whole block, of all tokens up to the block's end."""
        hashes, before, size = [], 0, self.block_size
        for start in range(0, len(ids) - len(ids) % size, size):
            before = hash((before, *ids[start:start + size]))
            hashes.append(before)
        return hashes
