"""Copies of a CUDA device: a stream for each priority, and gates at which the less urgent ones wait.

A copy in one stream gets little bandwidth next to a long queue of copies in another (3.5 of 54 GB/s, bare copies on an
H200): KV that a request waits for would be delayed by all the layers that a step has queued. So a word of device memory
is 1 while a more urgent copy runs, and each chunk of a less urgent copy first waits until it is 0. All of this happens
in stream order, so that no copy can wait for itself, and in CUDA graphs too.

This file and link_cuda.py are the only two in this package that import torch.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from spillover.errors import SpilloverError
from spillover.kernels import native
from spillover.memory.transfer.cuda_driver import Addresses, CudaPinner, cuda_driver
from spillover.memory.transfer.host_pool import HostPool
from spillover.memory.transfer.link_queue import LinkQueue, Priority, QueuedCopy

CHUNK_BYTES = 16 << 20  # bytes of a prefetch between two waits at the gates: 0.3 ms of the link
BURST_SECONDS = 0.05  # seconds for which restores may block prefetches before these get a share
RATE = 25e9  # assumed bytes per second until a copy has been measured

Event = torch.cuda.Event
Source = Tensor | Callable[[], Tensor]


class CudaTransfers:
    """A memory.transfer.transfers.Transfers whose streams wait for each other; few methods, like `copy`, block."""

    def __init__(self, device: torch.device, pool: HostPool | None = None) -> None:
        self._driver = cuda_driver()
        self._context = self._driver.context(device.index or 0)
        self._table = self._driver.table()
        self._library = native.library()  # compile it now, rather than during the first copy
        self.pool = pool or HostPool(CudaPinner(device.index or 0))
        self.queue = LinkQueue(duplex=True, rate=RATE)
        self.device = device
        # Streams of different device priority share no hardware queue, so that none is blocked by a waiting one.
        self._streams = {each: torch.cuda.Stream(device, priority=-1 if each is Priority.RESTORE else 0)  # type: ignore[no-untyped-call]
                         for each in Priority}
        self._gates = torch.zeros(len(Priority), dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # the gates must be zero before a stream reads them
        self._reading = ThreadPoolExecutor(1, "spillover-weights")  # reads sources that are functions
        self._thread = threading.local()  # the event of each thread
        self._burst_began = self._restored_at = 0.0

    def stream(self, priority: Priority) -> torch.cuda.Stream:
        return self._streams[priority]

    def start(self, target: Tensor, source: Source, priority: Priority,
              after: Event | None = None) -> Event | Future[Event]:
        if isinstance(source, Tensor):
            return self.start_all([(target, source)], priority, after)
        return self._reading.submit(lambda: self.start_all([(target, source())], priority, after))

    @torch.inference_mode()
    def start_all(self, pairs: Sequence[tuple[Tensor, Tensor]], priority: Priority, after: Event | None = None,
                  counted: bool = True) -> Event:
        """Queue copies (target, source) of bytes; return the event of their completion. `counted` is False for copies
        captured in a CUDA graph, which are counted when it is replayed."""
        stream = self._streams[priority]
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream), self._closed_gate(stream, priority):
            for target, source in pairs:
                target, source = target.view(-1), source.view(-1)
                for start in range(0, len(target), CHUNK_BYTES):
                    self._wait_at_gates(priority)
                    target[start : start + CHUNK_BYTES].copy_(source[start : start + CHUNK_BYTES], non_blocking=True)
            ended: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ended.record(stream)
        if counted:
            self.queue.count(priority, sum(target.nbytes for target, _ in pairs))
        return ended

    def wait(self, ticket: Event | Future[Event]) -> None:
        torch.cuda.current_stream().wait_event(ticket.result() if isinstance(ticket, Future) else ticket)

    def record_event(self) -> Event:
        event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def demand(self, target: Tensor, source: Tensor) -> None:
        """Copy in the order of the current stream, which needs the result to continue, ahead of prefetches."""
        with self._closed_gate(torch.cuda.current_stream(), Priority.DEMAND):
            target.copy_(source, non_blocking=True)
        self.queue.count(Priority.DEMAND, target.nbytes)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the host pool, pinned if possible; `to_device` copies it back."""
        try:
            memory = self.pool.allocate(max(1, tensor.nbytes), "sleep", pinned=True)
        except SpilloverError:  # it could not be pinned
            memory = self.pool.allocate(max(1, tensor.nbytes), "sleep")
        host = torch.frombuffer(memory, dtype=torch.uint8)[: tensor.nbytes]
        self.start_all([(host, _bytes_of(tensor))], Priority.SPILL, self.record_event()).synchronize()
        return host.view(tensor.dtype).view(tensor.shape)

    def to_device(self, tensor: Tensor) -> Tensor:
        """Copy a tensor that `to_host` returned back to the device, and free the host memory."""
        target = torch.empty_like(tensor, device=self.device)
        self.start_all([(_bytes_of(target), _bytes_of(tensor))], Priority.DEMAND, self.record_event()).synchronize()
        self.pool.free(tensor.data_ptr())
        return target

    def queue_copies(self, targets: Addresses, sources: Addresses, sizes: Addresses, priority: Priority,
                     pinned: bool) -> None:
        """Queue copies between addresses on the stream of a priority."""
        self._wait_at_gates(priority)
        self._driver.copy(targets, sources, sizes, self._streams[priority].cuda_stream, pinned)
        self.queue.count(priority, int(sizes.sum()))

    def copy(self, targets: Addresses, sources: Addresses, sizes: Addresses, host: Addresses,
             priority: Priority) -> None:
        """Copy between addresses and return when done; `host`: the addresses that are in the host pool."""
        done, pinned = self._event(), self.pool.pin(host.astype(np.int64))
        stream = self._streams[priority].cuda_stream
        with self.queue.admit(QueuedCopy(priority, int(sizes.sum()))):
            gate = self._gate(priority) if priority is Priority.RESTORE and self._may_block_prefetches() else 0
            if self._library is not None:
                code = self._library.cuda_copy(
                    ctypes.byref(self._table), self._context, gate or None, targets.ctypes.data, sources.ctypes.data,
                    sizes.ctypes.data, len(sizes), stream, done, pinned)
                if code:
                    raise RuntimeError(f"a copy over the link failed with CUDA error {code}")
            else:
                self._driver.copy(targets, sources, sizes, stream, pinned)
                self._driver.finish(stream, done)
        if priority is Priority.RESTORE:
            self._restored_at = time.monotonic()

    def finish(self, priority: Priority) -> None:
        """Sleep until all work queued so far in the stream of a priority has completed."""
        self._driver.finish(self._streams[priority].cuda_stream, self._event())

    def close(self) -> None:
        self._reading.shutdown()
        for priority in (Priority.DEMAND, Priority.PREFETCH):
            self._streams[priority].synchronize()
        self.pool.close()

    @contextmanager
    def _closed_gate(self, stream: torch.cuda.Stream, priority: Priority) -> Iterator[None]:
        """Make prefetches wait for the copies queued within the context, if their priority is DEMAND."""
        if priority is Priority.DEMAND:
            self._driver.write_value(stream.cuda_stream, self._gate(priority), 1)
        try:
            yield
        finally:
            if priority is Priority.DEMAND:
                self._driver.write_value(stream.cuda_stream, self._gate(priority), 0)

    def _wait_at_gates(self, priority: Priority) -> None:
        """Make the stream of PREFETCH wait while a more urgent copy of its direction runs; do nothing for others."""
        if priority is Priority.PREFETCH:
            stream = self._streams[priority].cuda_stream
            for above in (Priority.RESTORE, Priority.DEMAND):
                self._driver.wait_value(stream, self._gate(above), 0)

    def _gate(self, priority: Priority) -> int:
        return self._gates.data_ptr() + 4 * priority

    def _may_block_prefetches(self) -> bool:
        """Return whether a restore may block prefetches, which is limited in time if restores follow each other."""
        now = time.monotonic()
        if now - self._restored_at > BURST_SECONDS or now - self._burst_began > 2 * BURST_SECONDS:
            self._burst_began = now
        return now - self._burst_began <= BURST_SECONDS

    def _event(self) -> int:
        """Return the event of this thread; the first call also makes the device's context the thread's current one."""
        if not hasattr(self._thread, "event"):
            self._driver.set_context(self._context)
            self._thread.event = self._driver.make_event()
        return int(self._thread.event)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
