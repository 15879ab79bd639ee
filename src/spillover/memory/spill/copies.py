"""Copies over the link between the device and host memory: run on separate threads, metered on completion."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from spillover.memory.spill.direct import split_ended
from spillover.memory.spill.host import Entry, Slots
from spillover.memory.spill.loads import CopyEnd, CopyIn, CopyOut, Load, LoadState, batches
from spillover.memory.spill.store_report import Meter
from spillover.memory.tiers.base import Lane, Ticket
from spillover.memory.transfer.link import DeviceLink

COPY_SECONDS = 0.003  # approximate duration of one copy over the link, so that others need not wait long
LINK_SECONDS = 10.0  # deadline of a copy over the link in seconds


class LinkCopies:
    """The copies in flight in both directions. A copy pins its entries until a pop_copied method returns it."""

    def __init__(self, link: DeviceLink, slots: Slots, rate: float, wake: Callable[[], None]) -> None:
        """Create the lanes. `rate`: bytes per second of the link, which gives the number of blocks of one copy."""
        self.batch = max(1, int(COPY_SECONDS * rate / link.slot_bytes))  # maximum number of blocks of one copy
        self.to_host, self.to_device = Meter(), Meter()
        self.failures = 0  # number of blocks whose copy failed
        self._link = link
        self._slots = slots
        self._out = Lane("spill", 1, wake)
        self._in = Lane("restore", 2, wake)  # one thread submits a copy while the other waits for its copy
        self._outgoing: list[CopyOut] = []
        self._incoming: list[CopyIn] = []

    @property
    def busy(self) -> bool:
        return bool(self._outgoing or self._incoming)

    @property
    def loading(self) -> bool:
        return bool(self._incoming)

    @property
    def loaded(self) -> bool:
        """Return whether a copy to the device has completed and pop_copied_in() has not returned it yet."""
        return any(copy.ticket.done() for copy in self._incoming)

    def start_out(self, blocks: Sequence[int], entries: Sequence[Entry], on_end: CopyEnd) -> None:
        for start in range(0, len(entries), self.batch):
            part, to = list(blocks[start : start + self.batch]), list(entries[start : start + self.batch])
            self._outgoing.append(CopyOut(self._submit(self._out, self._link.copy_out, part, to), part, to, on_end))

    def start_in(self, held: Sequence[Load]) -> None:
        """Start copying loads from host memory to their device blocks."""
        for loads in batches(held, self.batch):
            entries = [entry for load in loads for entry in load.entries]
            blocks = [block for load in loads for block in load.blocks]
            for load in loads:
                load.state = LoadState.COPYING
            self._incoming.append(CopyIn(self._submit(self._in, self._link.copy_in, blocks, entries), blocks, loads))

    def pop_copied_out(self) -> list[tuple[CopyOut, float | None]]:
        """Return completed copies from the device, with the seconds each took; None if it failed."""
        self._out.drain()
        ended, self._outgoing = split_ended(self._outgoing)
        return [(copy, self._count(copy, self.to_host)) for copy in ended]

    def pop_copied_in(self) -> list[tuple[CopyIn, float | None]]:
        """Return completed copies to the device, with the seconds each took; None if it failed."""
        self._in.drain()
        ended, self._incoming = split_ended(self._incoming)
        return [(copy, self._count(copy, self.to_device)) for copy in ended]

    def entries(self) -> Iterator[Entry]:
        for copy in self._outgoing:
            yield from copy.entries
        for back in self._incoming:
            for load in back.loads:
                yield from load.entries

    def close(self, deadline: float) -> bool:
        """Stop the threads; False if a copy may still access the link's memory."""
        self._out.close(deadline)
        self._in.close(deadline)
        copies: list[CopyIn | CopyOut] = [*self._outgoing, *self._incoming]
        return all(copy.ticket.done() for copy in copies)

    def _submit(self, lane: Lane, copy: Callable[..., None], blocks: Sequence[int],
                entries: Sequence[Entry]) -> Ticket[float]:
        slots = self._slots.views([entry.slot for entry in entries])
        arguments = (blocks, slots) if lane is self._out else (slots, blocks)

        def work() -> float:
            started = time.perf_counter()
            copy(*arguments)
            return time.perf_counter() - started

        return lane.submit(work, time.monotonic() + LINK_SECONDS)

    def _count(self, copy: CopyIn | CopyOut, meter: Meter) -> float | None:
        seconds = copy.ticket.result()
        if seconds is None:
            self.failures += len(copy.blocks)
        else:
            meter.bytes += len(copy.blocks) * self._link.slot_bytes
            meter.seconds += seconds
        return seconds
