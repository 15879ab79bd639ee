"""The connector to host memory, shared pool, disks and remote store: restores and spills."""

from __future__ import annotations

import time
from collections.abc import Sequence

from spillover.memory.connector import Progress
from spillover.memory.kv.events import BlockEvents
from spillover.memory.kv.kv_cache import KVCache
from spillover.memory.spill.offload import Offload
from spillover.memory.spill.report import TierReport
from spillover.memory.spill.restore import Lookups, Restore, Stored
from spillover.memory.spill.restore_plan import ComputeCost, first_to_load
from spillover.memory.spill.spiller import Spiller
from spillover.memory.spill.store import SpillStore

MAX_DEFERRED = 8  # maximum number of hurried polls in a row that may defer copies, while enough blocks are available
READY_SHARE = 8  # at least 1/READY_SHARE of all blocks should be available without waiting for a copy


class TieredConnector:
    def __init__(self, kv: KVCache, store: SpillStore, margin: int = 32, restore: str = "auto",
                 prefill_seconds: float | None = None) -> None:
        """Connect the tiers. `margin`: minimum number of blocks kept ready to be overwritten. `restore`: whether stored
        blocks are loaded rather than recomputed: "auto", "always" or "never". `prefill_seconds`: prefill time per token
        until steps have been measured; None if unknown."""
        assert kv.prefix_caching, "stored blocks are those of the prefix tree"
        margin = min(max(margin, kv.num_total // READY_SHARE), kv.num_total // 2)
        self.store = store
        self.tiers = store.tiers
        self.restore = restore
        self.cost = ComputeCost(prefill_seconds)
        self._kv = kv
        self._spiller = kv.evictor = Spiller(kv.pool, kv.tree, store, margin)
        self._lookups = Lookups(kv, store)
        self._restores: dict[str, Restore] = {}
        self._offload = Offload(kv, store)
        self._num_deferred = 0

    # Waiting requests

    def lookup(self, seq: str, tokens: Sequence[int], salt: str | None, coming: bool = False) -> bool:
        if self.restore == "never":
            return True
        if not self._lookups.lookup(seq, tokens, salt):
            return False
        return not coming or not self._lookups.should_wait(seq, self.cost, time.monotonic())

    def forget(self, seq: str) -> None:
        self._lookups.forget(seq)

    # Running requests

    def begin(self, seq: str, tokens: Sequence[int], salt: str | None) -> int | None:
        kv = self._kv
        have, room = len(kv.table(seq)), kv.num_total // len(kv.windows) - 1
        if self.restore == "never":
            return len(tokens)
        found = self._lookups.found(seq, tokens, salt, have)
        tiers, width = found.tiers[: max(0, room - have)], len(kv.windows)
        mode = self.restore if self.cost.token_seconds is not None else "always"
        first = first_to_load(tiers, mode, self.store.seconds,
                              (self.cost.token_seconds or 0.0) * kv.block_size, self.cost.step_seconds,
                              may_split=all(window is None for window in kv.windows))
        if first == len(tiers):
            return len(tokens)
        if not kv.extend_to_load(seq, have + len(tiers)):
            return None
        stored = Stored(tiers[first:], found.keys[first * width : len(tiers) * width])
        self._restores[seq] = Restore(kv, self.store, seq, have + first, stored, backwards=first > 0)
        return (have + first) * kv.block_size

    def progress(self, seq: str, num_computed: int) -> Progress | None:
        restore, size = self._restores.get(seq), self._kv.block_size
        if restore is None:
            return Progress(num_computed)
        if restore.broken(time.monotonic()):
            return None
        sources: dict[str, int] = {}
        if num_computed % size == 0:
            sources = {tier: blocks * size for tier, blocks in restore.loaded(num_computed // size).items()}
        for tier, tokens in sources.items():
            self.store.count_hit(tier, tokens)
            num_computed += tokens
        ended = num_computed >= restore.end * size
        if ended:
            del self._restores[seq]
        return Progress(num_computed, sources, restore.pending, ended)

    def limit(self, seq: str, num_computed: int, num_tokens: int) -> int:
        restore, size = self._restores.get(seq), self._kv.block_size
        block = restore.limit(num_computed // size) if restore is not None else None
        return num_tokens if block is None else max(num_computed, block * size)

    def offload(self, seq: str, num_blocks: int) -> bool:
        return self._offload.start(seq, num_blocks)

    def host_blocks(self, seq: str) -> tuple[int, ...]:
        return self._offload.slots(seq)

    def end(self, seq: str) -> None:
        if seq in self._restores:
            self._restores.pop(seq).drop()
        self._offload.release(seq)

    # Between steps

    def observe(self, prefill_tokens: int, num_tokens: int, seconds: float) -> None:
        self.cost.observe(prefill_tokens, num_tokens, seconds)

    def reserve(self, num_blocks: int) -> None:
        self._spiller.reserve = min(num_blocks, self._kv.num_total // 4)

    def poll_loads(self) -> None:
        self.store.poll_loads()

    def poll(self, hurried: bool = False) -> None:
        self._num_deferred += 1
        hurried &= not self.store.eager  # other engines may wait for these blocks: copy them during prefill
        defer = hurried and self._num_deferred < MAX_DEFERRED
        if defer and not self._offload.moving and not self._spiller.few_available:
            self.store.poll_loads()
            return
        self._num_deferred = 0
        self.store.poll()
        self._offload.poll()
        self._spiller.poll()

    def wait(self, seconds: float) -> None:
        self.store.wait(seconds)

    @property
    def busy(self) -> bool:
        return self.store.busy

    @property
    def has_urgent_spills(self) -> bool:
        return self.store.eager and (self._spiller.waiting or self.store.copying)

    # Stored blocks

    def publish_to(self, events: BlockEvents) -> None:
        self.store.publish_to(events)

    def reports(self) -> list[TierReport]:
        return self.store.reports()

    def clear(self, external: bool = False) -> None:
        self.store.clear(external)

    def close(self, deadline: float) -> None:
        if self.tiers:
            now = time.monotonic()
            while now < deadline and (self._spiller.flush() or self.busy):
                self.poll()
                self.store.flush(min(deadline, now + 0.1))
                now = time.monotonic()
        self.store.close(deadline)

    def check(self) -> None:
        self._spiller.check()
        self.store.check()
