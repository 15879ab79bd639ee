"""The host memory of an engine: one pool under one budget, in huge pages, pinned if a device copies from it.

It stores weights that the device has no room for, spilled KV blocks, and device memory during sleep. Slabs are found by
address, so that a copy only has to give the addresses it is about to read or write.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from spillover.errors import SpilloverError
from spillover.kernels.huge_pages import PAGE, address_of, map_pages
from spillover.units import format_bytes

POPULATED_AT_ONCE = 256 << 20  # bytes of a slab that one thread populates in one call
_THREADS = 8


class Pinner(Protocol):
    """A pinner of memory for a device: memory.transfer.cuda_driver."""

    def populate(self, address: int, nbytes: int) -> None: ...

    def register(self, address: int, nbytes: int) -> bool: ...

    def unregister(self, address: int) -> None: ...


@dataclass
class _Slab:
    memory: memoryview
    address: int
    use: str
    pinned: bool | None = None  # whether the slab is pinned; None if that was not tried yet

    @property
    def page_bytes(self) -> int:
        """Return the slab's bytes rounded up to whole pages, which are what can be pinned."""
        return -(-self.memory.nbytes // PAGE) * PAGE


class _Slabs:
    """The slabs sorted by address. It is immutable and replaced as a whole, so that lookups need no lock."""

    def __init__(self, slabs: list[_Slab], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> None:
        self.slabs = slabs
        self._starts = starts
        self._ends = ends

    @classmethod
    def empty(cls) -> _Slabs:
        nothing = np.empty(0, dtype=np.int64)
        return cls([], nothing, nothing)

    def with_one(self, slab: _Slab) -> _Slabs:
        place = int(np.searchsorted(self._starts, slab.address))
        return _Slabs([*self.slabs[:place], slab, *self.slabs[place:]], np.insert(self._starts, place, slab.address),
                      np.insert(self._ends, place, slab.address + slab.memory.nbytes))

    def without(self, gone: Collection[int]) -> _Slabs:
        """Return the slabs except for those that start at these addresses."""
        left = np.array([slab.address not in gone for slab in self.slabs], dtype=bool)
        return _Slabs([slab for slab in self.slabs if slab.address not in gone], self._starts[left], self._ends[left])

    def find(self, addresses: npt.NDArray[np.int64]) -> list[_Slab]:
        """Return the distinct slabs that contain these addresses; ValueError if an address is in none."""
        places = np.searchsorted(self._starts, addresses, side="right") - 1
        if len(places) and (places.min() < 0 or (addresses >= self._ends[places]).any()):
            raise ValueError("memory that is not of this pool")
        return [self.slabs[place] for place in set(places.tolist())]


class HostPool:
    keeps: ClassVar[bool] = False  # whether to keep pinned slabs for the next pool of this process, as pinning is slow
    _kept: ClassVar[dict[int, list[_Slab]]] = {}

    def __init__(self, pinner: Pinner | None = None, limit: int | None = None) -> None:
        """Create a pool. `pinner`: None if the device is the CPU; `limit`: maximum bytes, None if there is none."""
        self._pinner = pinner
        self._limit = limit
        self._slabs = _Slabs.empty()
        self._lock = threading.Lock()
        self._pinning = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, "spillover-host-pool")
        self._expected: deque[tuple[int, Future[_Slab]]] = deque()
        self._bytes: dict[str, int] = {}

    @property
    def bytes_by_use(self) -> dict[str, int]:
        return dict(self._bytes)

    def expect(self, nbytes: int, count: int, use: str) -> None:
        """Pin `count` slabs of this size in the background, as many take seconds; `allocate` returns them later."""
        count -= len(self._kept.get(nbytes, ()))
        if self._pinner is not None and count > 0:
            self._expected += [(nbytes, self._threads.submit(self._make, nbytes, use, True, False))
                               for _ in range(count)]

    def allocate(self, nbytes: int, use: str, pinned: bool = False) -> memoryview:
        """Allocate memory for "weights", "kv" or "sleep"; MemoryError if it would exceed the budget, for which "sleep"
        does not count.

        `pinned`: pin it now, and raise if that fails; otherwise the first copy that uses it pins it, on its thread.
        """
        with self._lock:
            used = sum(self._bytes.values()) - self._bytes.get("sleep", 0)
            if use != "sleep" and self._limit is not None and used + nbytes > self._limit:
                raise MemoryError(f"{format_bytes(nbytes)} of host memory for {use} are over the budget of "
                                  f"{format_bytes(self._limit)}, of which {format_bytes(used)} are in use")
            self._bytes[use] = self._bytes.get(use, 0) + nbytes
        try:
            slab = self._take(nbytes, use, pinned)
        except BaseException:  # the system or the driver refused it
            with self._lock:
                self._bytes[use] -= nbytes
            raise
        with self._lock:
            self._slabs = self._slabs.with_one(slab)
        return slab.memory

    def free(self, address: int) -> None:
        """Free memory that `allocate` returned; no copy that uses it may be running."""
        self._drop([slab for slab in self._slabs.slabs if slab.address == address])

    def release(self, use: str) -> None:
        """Free all memory of a use, or keep it for the next pool; no copy that uses it may be running."""
        self._drop([slab for slab in self._slabs.slabs if slab.use == use])

    def adopt(self, memory: memoryview, slab_bytes: int, use: str = "pool") -> None:
        """Allow copies to use memory of another owner until `disown`; the first copy that uses a slab pins it. It does
        not count for the budget, and no copy may cross from one slab into the next."""
        if self._pinner is None:
            return
        start = address_of(memory)
        slabs = [_Slab(memory[at : at + slab_bytes], start + at, use)
                 for at in range(0, memory.nbytes, slab_bytes)]
        with self._lock:
            for slab in slabs:
                self._slabs = self._slabs.with_one(slab)

    def adopt_pinned(self, memory: memoryview) -> bool:
        """Adopt weights as one slab until `close`, and pin them now; return whether the device can read them."""
        if self._pinner is None:
            return True
        self.adopt(memory, memory.nbytes, "shared weights")
        if self.pin([address_of(memory)]):
            return True
        self.disown(memory)
        return False

    def disown(self, memory: memoryview) -> None:
        """Forget and unpin memory passed to `adopt`; no copy that uses it may be running."""
        if self._pinner is not None:
            start = address_of(memory)
            self._free_slabs([slab for slab in self._slabs.slabs if start <= slab.address < start + memory.nbytes])

    def pin(self, addresses: Sequence[int] | npt.NDArray[np.int64]) -> bool:
        """Pin the slabs that contain these addresses, if they are not pinned; return whether all of them are now.

        It takes 0.2 ms per megabyte. The driver refuses if locked memory is limited: then copies are slower.
        """
        pinned = True
        for slab in self._slabs.find(np.asarray(addresses, dtype=np.int64)):
            if slab.pinned is None:
                with self._pinning:
                    if slab.pinned is None:
                        slab.pinned = self._pin(slab)
            pinned = pinned and slab.pinned
        return pinned

    def close(self) -> None:
        """Free all memory except KV, which `release` frees once no copy that uses it can be running."""
        for _, expected in self._expected:
            expected.result()
        self._threads.shutdown()
        self.release("weights")
        self.release("sleep")
        self._free_slabs([slab for slab in self._slabs.slabs if slab.use == "shared weights"])

    def _take(self, nbytes: int, use: str, pinned: bool) -> _Slab:
        """Return a slab that was kept or expected, or create one."""
        if pinned and self._kept.get(nbytes):
            slab = self._kept[nbytes].pop()
            slab.use = use
            return slab
        if pinned and self._expected and self._expected[0][0] == nbytes:
            return self._expected.popleft()[1].result()
        return self._make(nbytes, use, pinned, True)

    def _make(self, nbytes: int, use: str, pinned: bool, spread: bool) -> _Slab:
        """Create a slab. `spread`: the pool's threads populate its pages, rather than the caller's thread."""
        memory = map_pages(nbytes)
        slab = _Slab(memory, address_of(memory), use)
        if pinned and self._pinner is not None:
            ranges = [(slab.address + start, min(POPULATED_AT_ONCE, slab.page_bytes - start))
                       for start in range(0, slab.page_bytes, POPULATED_AT_ONCE)]
            for done in (self._threads.map if spread else map)(self._pinner.populate, *zip(*ranges, strict=True)):
                assert done is None
            slab.pinned = self._pinner.register(slab.address, slab.page_bytes)
            if not slab.pinned:
                raise SpilloverError(f"{nbytes:,} bytes of host memory for {use} could not be pinned; raise the limit "
                                     "of locked memory (ulimit -l) or --gpu-memory")
        return slab

    def _drop(self, slabs: Sequence[_Slab]) -> None:
        with self._lock:
            self._slabs = self._slabs.without({slab.address for slab in slabs})
            for slab in slabs:
                self._bytes[slab.use] -= slab.memory.nbytes
        for slab in slabs:
            if self.keeps and slab.pinned and slab.use == "weights":
                self._kept.setdefault(slab.memory.nbytes, []).append(slab)
            elif slab.pinned and self._pinner is not None:
                self._pinner.unregister(slab.address)

    def _free_slabs(self, slabs: Sequence[_Slab]) -> None:
        """Forget and unpin memory of other owners."""
        with self._lock:
            self._slabs = self._slabs.without({slab.address for slab in slabs})
        for slab in slabs:
            if slab.pinned and self._pinner is not None:
                self._pinner.unregister(slab.address)
            slab.memory.release()

    def _pin(self, slab: _Slab) -> bool:
        if self._pinner is None:
            return False
        # Populate the pages first, so that the driver, which blocks launches while it pins, does not have to.
        self._pinner.populate(slab.address, slab.page_bytes)
        return self._pinner.register(slab.address, slab.page_bytes)
