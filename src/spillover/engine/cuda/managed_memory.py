"""Managed memory of a CUDA device, by default no more than the card has free: an oversubscribed driver can hang a
machine."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from spillover.errors import SpilloverError
from spillover.kernels.huge_pages import HUGE_PAGE
from spillover.memory.managed.pages import Pages
from spillover.memory.transfer.cuda_driver import (
    NO_PREFERRED_LOCATION,
    NOT_READ_MOSTLY,
    PREFERRED_LOCATION,
    READ_MOSTLY,
    CudaDriver,
    cuda_driver,
)
from spillover.memory.transfer.cuda_transfers import CudaTransfers
from spillover.memory.transfer.link_queue import Priority
from spillover.units import format_bytes


class ManagedBuffer:
    """Managed memory in a form that torch.as_tensor accepts; freed together with the last tensor over it."""

    def __init__(self, driver: CudaDriver, context: int, address: int, nbytes: int) -> None:
        """Hold memory at `address`, large enough for `nbytes` after rounding the address up to a huge page."""
        self.address = -(-address // HUGE_PAGE) * HUGE_PAGE
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}
        weakref.finalize(self, _free, driver, context, address).atexit = False  # at exit the driver frees the memory


class CudaManagedMemory:
    """Allocates and moves managed memory of a CUDA device; implements memory.managed.pages.ManagedMemory."""

    faults = None  # page faults are not counted: only CUPTI could

    def __init__(self, transfers: CudaTransfers, reserved_bytes: int, oversubscribe: bool,
                 driver: CudaDriver | None = None) -> None:
        """Make the allocator. `reserved_bytes`: bytes of the device that are reserved for other memory;
        `oversubscribe`: whether more may be allocated than the card has free."""
        self._transfers = transfers
        self._driver = driver or cuda_driver()
        self._device = transfers.device.index or 0
        self._context = self._driver.context(self._device)
        self._driver.set_context(self._context)
        if not self._driver.moves_pages(self._device):
            raise SpilloverError("--weights uvm needs a driver and a device whose managed pages move when they are "
                                 "touched, and this one has none; use --weights demand")
        self._reserved_bytes = reserved_bytes
        self._limit = self._driver.free_memory() - reserved_bytes
        self._oversubscribe = oversubscribe
        self._total = 0
        self._advised = False
        self._evicted: torch.cuda.Event | None = None  # the last eviction ahead of need

    def allocate(self, nbytes: int) -> ManagedBuffer:
        self._driver.set_context(self._context)
        free = self._driver.free_memory()
        # Earlier allocations may be on the card or on the host: check the total and the currently free memory.
        if (self._total + nbytes > self._limit or nbytes > free) and not self._oversubscribe:
            raise SpilloverError(
                f"{format_bytes(self._total + nbytes)} of managed memory do not fit into the "
                f"{format_bytes(max(0, self._limit))} that the card had free next to "
                f"{format_bytes(self._reserved_bytes)} of other memory, and a driver with more of it than the card "
                "holds can hang the machine; use --weights experts or sequential, or --uvm-oversubscribe to take that "
                "risk")
        address = self._driver.allocate_managed(nbytes)
        self._total += nbytes
        if address % HUGE_PAGE:
            self._driver.free(address)
            address = self._driver.allocate_managed(nbytes + HUGE_PAGE)
            self._total += HUGE_PAGE
        return ManagedBuffer(self._driver, self._context, address, nbytes)

    def to_device(self, pages: Sequence[Pages], ahead: bool = False) -> None:
        if not ahead and self._evicted is not None:  # the room for these pages may be that of evicted ones
            torch.cuda.current_stream().wait_event(self._evicted)
            self._evicted = None
        self._prefetch(pages, self._device, ahead)

    def to_host(self, pages: Sequence[Pages], ahead: bool = False) -> None:
        if self._advised:
            self._drop(pages)
            return
        self._prefetch(pages, None, ahead)
        if ahead:
            self._evicted = self._transfers.stream(Priority.PREFETCH).record_event()

    def begin_prefetch(self) -> None:
        self._transfers.stream(Priority.PREFETCH).wait_stream(torch.cuda.current_stream())

    def wait(self) -> None:
        torch.cuda.current_stream().wait_stream(self._transfers.stream(Priority.PREFETCH))
        self._evicted = None

    def advise(self, pages: Sequence[Pages], advised: bool) -> None:
        self._driver.set_context(self._context)
        torch.cuda.synchronize()
        for address, nbytes in pages:
            if advised:
                self._driver.advise(address, nbytes, PREFERRED_LOCATION)
            self._driver.advise(address, nbytes, READ_MOSTLY if advised else NOT_READ_MOSTLY)
            if not advised:
                self._driver.advise(address, nbytes, NO_PREFERRED_LOCATION)
        self._advised = advised

    def _prefetch(self, pages: Sequence[Pages], device: int | None, ahead: bool) -> None:
        stream = self._transfers.stream(Priority.PREFETCH) if ahead else torch.cuda.current_stream()
        self._driver.set_context(self._context)
        for address, nbytes in pages:
            self._driver.prefetch(address, nbytes, device, stream.cuda_stream)
        priority = Priority.SPILL if device is None else Priority.PREFETCH if ahead else Priority.DEMAND
        self._transfers.queue.count(priority, sum(each.nbytes for each in pages), len(pages))

    def _drop(self, pages: Sequence[Pages]) -> None:
        """Drop the device's copies of pages whose originals are on the host. A prefetch to the host would keep them;
        clearing the advice collapses the copies to the one at the preferred location, without moving anything."""
        torch.cuda.current_stream().synchronize()  # advice is not ordered with any stream
        self._driver.set_context(self._context)
        for address, nbytes in pages:
            self._driver.advise(address, nbytes, NOT_READ_MOSTLY)
            self._driver.advise(address, nbytes, READ_MOSTLY)


def _free(driver: CudaDriver, context: int, address: int) -> None:
    driver.set_context(context)
    driver.free(address)
