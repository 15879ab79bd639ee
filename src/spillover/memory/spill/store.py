"""All tiers below the device: blocks stored in host memory, shared pool, disks and remote store, and their copies.

A block is copied from the device to a slot of host memory, and from there to the tiers below; it is restored the same
way. Copies run on separate threads; all bookkeeping is done on the engine's thread, in poll(). Without a host tier a
few staging slots are used, and an entry is dropped as soon as it is not pinned. A tier whose memory this process has
mapped needs no slot (see direct.py).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from spillover.memory.kv.events import BlockEvents, EventSourceTier
from spillover.memory.policies.admission import AdmissionPolicy, Always
from spillover.memory.spill.copies import LinkCopies
from spillover.memory.spill.direct import DirectCopies, DirectIn
from spillover.memory.spill.host import Entry, HostCache, Slots
from spillover.memory.spill.last_tier import LastTier
from spillover.memory.spill.loads import CopyEnd, Fetch, Load, LoadState, Search
from spillover.memory.spill.private_slots import PrivateSlots
from spillover.memory.spill.report import TierReport
from spillover.memory.spill.store_report import HostReport, tier_reports
from spillover.memory.spill.tier_rates import TierRates
from spillover.memory.spill.write_down import WriteDown
from spillover.memory.tiers.base import Tier
from spillover.memory.transfer.link import DeviceLink

LINK_RATE = 10e9  # assumed bytes per second of a link that was not measured
LOAD_SECONDS = 15.0  # deadline of a load in seconds, including the wait for a slot
LOSSY_LOAD_SECONDS = 0.1  # seconds that a load waits for a slot before it may evict a block that no tier below has


class SpillStore:
    def __init__(
        self,
        link: DeviceLink,
        tiers: Sequence[Tier] = (),
        host_blocks: int = 0,
        staging_blocks: int = 32,
        eager: bool = False,
        admission: AdmissionPolicy | None = None,
        rates: dict[str, float] | None = None,
        link_rates: dict[str, tuple[float | None, float | None]] | None = None,
        wake: threading.Event | None = None,
    ) -> None:
        """Start the lanes. `rates`: bytes per second of loads from each tier, until measured; `link_rates`: measured
        rates (towards the tier, from it), reported next to those reached. Tiers set `wake` when work completes."""
        self.link = link
        self.tiers = tuple(tiers)
        self.eager = eager
        self.keeps = host_blocks > 0
        self.rates = TierRates(rates or {})
        self.spilled_blocks = 0
        self.dropped = 0  # number of blocks that left the device before they could be copied
        self.slots = Slots(link.allocate, link.slot_bytes, host_blocks or staging_blocks)
        self._host = HostCache(self.slots)
        self._admission = admission or Always()
        self._link_rates = link_rates or {}
        self._wake = wake or threading.Event()
        self.copies = LinkCopies(link, self.slots, self.rates.get("host", LINK_RATE), self._wake.set)
        self.direct = DirectCopies(link, self.tiers, self.keeps)
        self.private = PrivateSlots(self._host, self.copies, self._unpin)
        self._fetches: list[Fetch] = []
        self._last_tier = LastTier(self.tiers, self._note_presence)
        self._writes = WriteDown(self._host, self.tiers, self._admission, self._last_tier.note_offer, self._unpin)
        self._queue: deque[Load] = deque()  # loads that have no slot yet
        self._copyable: list[Load] = []  # held loads with a target block on the device
        self._waiters: dict[bytes, list[Load]] = {}  # key -> loads that wait for its entry to be filled
        self._hits: dict[str, int] = {}
        self._short = 0  # number of blocks that found no slot in the latest spill()

    # Spilling

    def holds(self, key: bytes) -> bool:
        """Return whether the block is known to be stored or settled, so that it can leave the device without a copy."""
        return self._host.use(key) is not None or self._last_tier.settled(key)

    def lookup_pending(self, key: bytes) -> bool:
        """Return whether a lookup in a tier is pending that decides whether the block can leave the device."""
        return self._last_tier.lookup_pending(key) and self._host.get(key) is None

    def note_use(self, keys: Iterable[bytes]) -> None:
        """Note that a request has used the blocks, so they should be kept: those that a tier lost are offered again."""
        for key in keys if self.tiers else ():
            self._last_tier.note_use(key)
            if not self._last_tier.has(key):
                self._note_presence(key, False)

    def spill(self, items: Sequence[tuple[bytes, int]], on_end: CopyEnd, lossy: bool = False) -> int:
        """Start copies of device blocks, in order; return how many got a slot. A block must not change before `on_end`
        is called with it. `lossy`: older blocks in host memory that no tier below has may be evicted for them."""
        if self.direct.spills:
            return self.direct.start_out(items, on_end)
        entries: list[Entry] = []
        for key, _ in items:
            entry = self._host.reserve(key, lossy or not self.tiers)
            if entry is None:
                break
            entries.append(entry)
        self._short = len(items) - len(entries)
        self.copies.start_out([block for _, block in items[: len(entries)]], entries, on_end)
        return len(entries)

    @property
    def room(self) -> int:
        """Return the maximum number of blocks that could be spilled now."""
        if self.direct.spills:
            return self.direct.room
        return self._host.spare if self.tiers else self.slots.limit

    def wanted(self, key: bytes) -> bool:
        """Return whether the admission policy accepts the block for the tier next to the device."""
        return self._admission.admit(key, "host" if self.keeps else self.tiers[0].name if self.tiers else "host")

    # Finding and loading

    def search(self, keys: Sequence[bytes]) -> Search:
        sources: list[str | None] = ["host" if self._ready(key) else None for key in keys]
        search = Search(sources, lambda tier, index, present: self._last_tier.note_result(tier, keys[index], present))
        self.note_use(key for key, source in zip(keys, sources, strict=True) if source is not None)
        self.search_again(search, keys)
        return search

    def search_again(self, search: Search, keys: Sequence[bytes]) -> None:
        """Look up the keys of the search that were not found in the tiers again."""
        for tier in self.tiers:
            missing = [index for index, source in enumerate(search.sources) if source is None]
            if missing:
                search.add_lookup(tier, missing, tier.lookup([keys[index] for index in missing]))
                search.ready(time.monotonic())

    def near(self, keys: Sequence[bytes]) -> list[str | None]:
        """Return the tier that is known to have each block; None if that would take a lookup or no tier has it."""
        return ["host" if self._ready(key) else self._tier_with(key) for key in keys]

    def open(self, keys: Sequence[bytes], tiers: Sequence[str]) -> list[Load]:
        """Start fetching blocks to host memory from the tiers where they were found; each stays pinned there until it
        is copied or dropped. Return the loads in order: consecutive blocks already in host memory share one load."""
        deadline = time.monotonic() + LOAD_SECONDS
        loads: list[Load] = []
        for key, tier in zip(keys, tiers, strict=True):
            entry, last = self._ready(key), loads[-1] if loads else None
            if entry and last and last.entries and last.tier == tier and len(last.keys) < self.copies.batch:
                last.keys.append(key)
            else:
                loads.append(last := Load([key], tier, deadline))
            if entry:
                self._hold(last, entry)
            else:
                self._queue.append(last)
        self._start_loads()
        return loads

    def send(self, loads: Sequence[Load], blocks: Sequence[int]) -> None:
        """Copy loads to device blocks, each of which stays in flight until its load's `on_end`."""
        at = 0
        for load in loads:
            load.blocks = blocks[at : at + len(load.keys)]
            at += len(load.keys)
            if load.state is LoadState.HELD:
                self._copyable.append(load)
        assert at == len(blocks), f"{len(blocks)} blocks for {at} that are loaded"
        self._flush_copies()

    def drop(self, load: Load) -> None:
        """Cancel a load that is no longer needed. One that is being copied completes; any other ends at once."""
        if load.pending and load.state is not LoadState.COPYING:
            self._end([load], LoadState.FAILED)

    @property
    def prefetch_room(self) -> int:
        """Return the maximum number of blocks that waiting requests may prefetch to host memory."""
        return self.slots.limit // 2

    def count_hit(self, tier: str, tokens: int) -> None:
        self._hits[tier] = self._hits.get(tier, 0) + tokens

    def seconds(self, tier: str, blocks: int) -> float:
        """Estimate how long loading n blocks from the tier takes."""
        way = {tier} if self.direct.reaches(tier) else {tier, "host"}
        return self.rates.seconds(way, blocks * self.link.slot_bytes)

    # Progress

    @property
    def busy(self) -> bool:
        """Return whether anything is in progress that poll() would advance. Work past its deadline does not count, so a
        tier that hangs stalls no caller."""
        if self.copying or self._queue or self._copyable or self._last_tier.busy:
            return True
        now = time.monotonic()
        tickets = itertools.chain((fetch.ticket for fetch in self._fetches), self._writes.tickets())
        return any(not ticket.expired(now) for ticket in tickets)

    @property
    def copying(self) -> bool:
        """Return whether blocks are being copied to or from the device."""
        return self.copies.busy or self.direct.busy

    def wait(self, seconds: float) -> None:
        """Wait until some work may have completed, for at most this many seconds."""
        self._wake.wait(seconds)

    def poll(self) -> None:
        """Process completed work and start the work that follows."""
        self._wake.clear()
        for tier in self.tiers:
            tier.poll()
        self.process_spills()
        loaded = self.copies.loaded or self.direct.loaded
        self._advance_loads()
        if loaded:  # a request can continue at once
            self._wake.set()
        self._last_tier.poll()
        self._writes.process_completed()
        self._writes.write_until(self._margin())

    def poll_loads(self) -> None:
        """Do the part of poll() that requests wait for."""
        if self.copies.loading or self.direct.loading or self._fetches or self._queue or self._copyable:
            for tier in self.tiers:
                tier.poll()
            self._advance_loads()

    def process_spills(self) -> None:
        """Do the part of poll() that frees device blocks."""
        for copy, seconds in self.copies.pop_copied_out():
            self.spilled_blocks += len(copy.blocks) if seconds is not None else 0
            self._finish_copies(copy.entries, seconds is not None, safe=not self.tiers)
            copy.on_end(copy.blocks, copy.entries)
        for direct in self.direct.pop_copied_out():
            stored = bool(direct.ticket.result())
            self.spilled_blocks += stored
            self._last_tier.note_offer(self.tiers[0], direct.key, stored)
            direct.on_end([direct.block], [Entry(direct.key, -1)])

    def flush(self, deadline: float) -> None:
        """Write blocks that only host memory has to the tiers below, until the deadline."""
        while self.tiers and time.monotonic() < deadline:
            self.poll()
            self._writes.write_until(self.slots.limit)
            if not self.busy:
                return
            self.wait(0.05)

    def clear(self, external: bool = False) -> None:
        """Forget stored blocks in host memory; with `external` also those in the tiers below it."""
        self._host.clear()
        if external:
            self._last_tier.clear()
            for tier in self.tiers:
                tier.clear()

    def close(self, deadline: float) -> None:
        """Stop all threads; the link's memory is freed only if no copy can access it any more."""
        for tier in self.tiers:
            tier.close(deadline)
        if self.copies.close(deadline) and self.direct.ended:
            self.link.close()

    def publish_to(self, events: BlockEvents) -> None:
        """Report the blocks of host memory and of tiers that know what they hold to `events`, and later changes."""
        if self.keeps:
            self._host.publish_to(events)
        for tier in self.tiers:
            if isinstance(tier, EventSourceTier):
                tier.publish_to(events)

    def reports(self) -> list[TierReport]:
        host = HostReport(len(self._host), self.slots.limit, self.copies.to_host, self.copies.to_device,
                          self.copies.failures, self._host.dropped) if self.keeps else None
        return tier_reports(host, self.tiers, self._hits, self._link_rates, self.link.slot_bytes, self.dropped)

    def check(self) -> None:
        self._host.check()
        pins: dict[int, int] = {}
        for entry in (*self.copies.entries(), *(fetch.entry for fetch in self._fetches), *self._writes.entries()):
            pins[entry.slot] = pins.get(entry.slot, 0) + 1
        for slot, count in pins.items():
            found = next(entry.pins for entry in self._host if entry.slot == slot)
            assert found >= count, f"slot {slot} has {found} pins but {count} copies"

    # Internal methods

    def _ready(self, key: bytes) -> Entry | None:
        entry = self._host.use(key)
        return entry if entry is not None and entry.ready else None

    def _tier_with(self, key: bytes) -> str | None:
        """Return a tier below host memory that is known to have the block."""
        return next((tier.name for tier in self.tiers if self._last_tier.has(key, tier)), None)

    def _find_tier(self, load: Load) -> bool:
        """Return whether a tier below host memory has the block; update load.tier if it is no longer the same one."""
        if any(tier.name == load.tier and tier.has(load.keys[0]) is not False for tier in self.tiers):
            return True
        # A mapped tier is tried without a lookup: its load fails quickly if it does not have the block.
        found = self.direct.tier.name if self.direct.tier is not None else self._tier_with(load.keys[0])
        load.tier = found or "host"
        return found is not None

    def _flush_copies(self) -> None:
        """Start the copies to the device that can be started now."""
        self.copies.start_in([load for load in self._copyable if load.entries])
        self.direct.start_in([load for load in self._copyable if not load.entries])
        self._copyable.clear()

    def _advance_loads(self) -> None:
        """Advance all loads as far as possible."""
        for copy, seconds in self.copies.pop_copied_in():
            if seconds:
                self.rates.observe("host", len(copy.blocks) * self.link.slot_bytes, seconds)
            self._end(copy.loads, LoadState.FAILED if seconds is None else LoadState.DONE)
        for direct in self.direct.pop_copied_in():
            self._finish_direct_load(direct)
        now = time.monotonic()
        if self._fetches:
            self._process_fetches(now)
        if self._queue:
            self._expire_queue(now)
            self._start_loads()
        self._flush_copies()

    def _finish_direct_load(self, copy: DirectIn) -> None:
        load, tier = copy.load, self.direct.tier
        assert tier is not None
        (key,), ok = load.keys, bool(copy.ticket.result())
        self._last_tier.note_result(tier, key, ok)
        if ok:
            self._last_tier.request_lookup(key)  # look up whether the last tier has it, too
            self.rates.observe(tier.name, copy.place * self.link.slot_bytes, copy.ticket.at - copy.started)
        lower = None if ok else self._lower_tier_with(key, tier)
        if lower is None:
            self._end([load], LoadState.DONE if ok else LoadState.FAILED)
        else:
            load.tier, load.state = lower.name, LoadState.WAITING
            self._queue.append(load)

    def _lower_tier_with(self, key: bytes, tier: Tier) -> Tier | None:
        """Return a tier below the given one that is known to have the block."""
        return next((each for each in self.tiers[self.tiers.index(tier) + 1 :] if self._last_tier.has(key, each)), None)

    def _process_fetches(self, now: float) -> None:
        pending = []
        for fetch in self._fetches:
            if fetch.ticket.done():
                ok = bool(fetch.ticket.result())
                self._last_tier.note_result(fetch.tier, fetch.entry.key, ok)
                if not ok and (another := self._fetch_lower(fetch, now)) is not None:
                    pending.append(another)
                    continue
                if ok:
                    self._last_tier.request_lookup(fetch.entry.key)  # look up whether the last tier has it, too
                    seconds = fetch.ticket.at - fetch.started  # not `now`: a step may have run in between
                    self.rates.observe(fetch.tier.name, fetch.place * self.link.slot_bytes, seconds)
                safe = not self._last_tier.lookup_pending(fetch.entry.key)
                if ok and safe:
                    self._writes.promote(fetch.entry, fetch.tier)
                self._finish_copies([fetch.entry], ok, safe, fetch.tier.name)
                continue
            if fetch.ticket.expired(now):  # the waiting loads fail; the slot stays until the worker no longer uses it
                fetch.ticket.cancel()
                self._end([load for load in self._waiters.pop(fetch.entry.key, ()) if load.pending], LoadState.FAILED)
            pending.append(fetch)
        self._fetches = pending

    def _fetch_lower(self, failed: Fetch, now: float) -> Fetch | None:
        """Fetch the block from a tier below the failed one, if one is known to have it."""
        key = failed.entry.key
        tier = self._lower_tier_with(key, failed.tier)
        if tier is None:
            return None
        for load in self._waiters.get(key, ()):
            load.tier = tier.name
        return Fetch(failed.entry, tier, now, 1, tier.load([(key, self.slots.view(failed.entry.slot))])[0])

    def _finish_copies(self, entries: Sequence[Entry], ok: bool, safe: bool, tier: str | None = None) -> None:
        """Finish a copy into these entries, from `tier` or (None) the device, which held one pin on each."""
        for entry in entries:
            if ok:
                self._host.mark_ready(entry, safe or entry.private)
            for load in self._waiters.pop(entry.key, ()) if self._waiters else ():
                if load.pending and ok:
                    self._hold(load, entry)
                elif load.pending and tier is not None and load.tier != tier:  # another tier has it
                    load.state = LoadState.WAITING
                    self._queue.append(load)
                elif load.pending:
                    self._end([load], LoadState.FAILED)
        if ok and not safe and (self.eager or not self.keeps):
            self._writes.write([entry for entry in entries if not entry.safe])
        for entry in entries:
            self._unpin(entry)

    def _unpin(self, entry: Entry) -> None:
        self._host.unpin(entry)
        if entry.pins == 0 and (entry.private or entry.forgotten or not self.keeps or not entry.ready):
            self._host.drop(entry)

    def _hold(self, load: Load, entry: Entry) -> None:
        self._host.pin(entry)
        load.entries.append(entry)
        self._held(load)

    def _held(self, load: Load) -> None:
        load.state = LoadState.HELD
        if load.blocks:
            self._copyable.append(load)

    def _end(self, loads: Sequence[Load], state: LoadState) -> None:
        for load in loads:
            if self._copyable and load.state is LoadState.HELD and load in self._copyable:
                self._copyable.remove(load)
            load.state = state
        for on_end, ended in itertools.groupby(loads, lambda load: load.on_end):
            if on_end is not None:
                on_end(list(ended))
        for load in loads:
            entries, load.entries = load.entries, []
            for entry in entries:
                self._unpin(entry)

    def _start_loads(self) -> None:
        """Start loads in order, as long as there are slots."""
        fetches: dict[str, list[Entry]] = {}
        now = time.monotonic()
        while self._queue:
            load = self._queue[0]
            if load.state is LoadState.WAITING:
                key = load.keys[0]
                entry = self._host.use(key)
                if entry is not None and entry.ready:
                    self._hold(load, entry)
                elif entry is not None:
                    load.state = LoadState.FETCHING
                    self._waiters.setdefault(key, []).append(load)
                elif not self._find_tier(load):
                    self._end([load], LoadState.FAILED)
                elif self.direct.reaches(load.tier):
                    self._held(load)
                else:
                    entry = self._host.reserve(key, now >= load.deadline - LOAD_SECONDS + LOSSY_LOAD_SECONDS)
                    if entry is None:
                        break
                    load.state = LoadState.FETCHING
                    self._waiters.setdefault(key, []).append(load)
                    fetches.setdefault(load.tier, []).append(entry)
            self._queue.popleft()
        for tier in self.tiers:
            if entries := fetches.get(tier.name):
                tickets = tier.load([(entry.key, self.slots.view(entry.slot)) for entry in entries])
                for place, (entry, ticket) in enumerate(zip(entries, tickets, strict=True), start=1):
                    self._fetches.append(Fetch(entry, tier, now, place, ticket))

    def _expire_queue(self, now: float) -> None:
        late = [load for load in self._queue if load.state is LoadState.WAITING and now > load.deadline]
        self._end(late, LoadState.FAILED)

    def _margin(self) -> int:
        """Return the number of slots to keep ready for the next spills, and for loads that wait for one."""
        wanted = max(2 * self.copies.batch, self._short) + len(self._queue)
        return min(wanted, self.slots.limit // 2) if self.keeps else 0

    def _note_presence(self, key: bytes, present: bool) -> None:
        """Note whether the last tier has the block. If not, host memory's copy is written to it before its eviction."""
        entry = self._host.get(key)
        if entry is None or not entry.ready or entry.private or entry.writes:
            return
        if present:
            self._host.mark_safe(entry)
        elif entry.safe:
            self._host.mark_unsafe(entry)
        if not present and self.eager and not self._last_tier.lookup_pending(key):
            self._writes.write([entry])
