"""The few calls of the CUDA driver that copies need, by ctypes. No torch here.

A copy a block through torch would give up and take back the interpreter each time, and wait for whoever has it then:
here a batch is one call. Host memory is pinned when a copy first meets it. NVIDIA's bindings (cuda-python) would be one
more thing to install and save ten declarations: kernels/native/cuda_copy.cpp needs the addresses of these functions.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]

_PORTABLE = 1  # pinned for every context
_STREAM_ORDER = 1  # sources are read when the stream gets there
_BLOCKING_SYNC, _DISABLE_TIMING = 1, 2
_UNSUPPORTED = 801
_POPULATE_WRITE = 23  # Linux 5.14; older ones refuse, which does no harm


class DriverTable(ctypes.Structure):
    """Addresses of functions, as kernels/native/cuda_copy.cpp takes them."""

    _fields_ = tuple((name, c_void_p) for name in (
        "set_context", "wait_event", "copy", "copy_batch", "record_event", "synchronize_event",
    ))


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes; the hints of places are for memory that the driver moves about by itself."""

    _fields_ = (
        ("source_order", c_int),
        ("source_type", c_int),
        ("source_id", c_int),
        ("target_type", c_int),
        ("target_id", c_int),
        ("flags", c_uint),
    )


@dataclass
class _Slab:
    address: int
    nbytes: int
    pinned: bool | None = None  # None: not tried yet


class _Owned:
    """Slabs by address."""

    def __init__(self, slabs: list[_Slab], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> None:
        self.slabs = slabs
        self._starts = starts
        self._ends = ends

    def with_one(self, slab: _Slab) -> _Owned:
        place = int(np.searchsorted(self._starts, slab.address))
        return _Owned([*self.slabs[:place], slab, *self.slabs[place:]], np.insert(self._starts, place, slab.address),
                      np.insert(self._ends, place, slab.address + slab.nbytes))

    def without(self, place: int) -> _Owned:
        return _Owned(self.slabs[:place] + self.slabs[place + 1 :], np.delete(self._starts, place),
                      np.delete(self._ends, place))

    def find(self, addresses: npt.NDArray[np.int64]) -> list[_Slab]:
        """Each that one of these lies in, once."""
        places = np.searchsorted(self._starts, addresses, side="right") - 1
        if len(places) and (places.min() < 0 or (addresses >= self._ends[places]).any()):
            raise ValueError("memory that no link allocated")
        return [self.slabs[place] for place in set(places.tolist())]


class CudaDriver:
    """Calls that act on a device need its context, which set_context makes the calling thread's."""

    def __init__(self) -> None:
        library = self._library = ctypes.CDLL("libcuda.so.1")
        for name, arguments in {
            "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
            "cuMemHostUnregister": (c_void_p,),
            "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
            "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
            "cuCtxSetCurrent": (c_void_p,),
            "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
            "cuEventCreate": (POINTER(c_void_p), c_uint),
            "cuEventRecord": (c_void_p, c_void_p),
            "cuEventSynchronize": (c_void_p,),
        }.items():
            getattr(library, name).argtypes = arguments
        self._batch = getattr(library, "cuMemcpyBatchAsync", None)  # from CUDA 12.8 on
        if self._batch is not None:
            self._batch.argtypes = (
                *(c_void_p, c_void_p, c_void_p, c_size_t, POINTER(_CopyAttributes), POINTER(c_size_t), c_size_t),
                *(POINTER(c_size_t), c_void_p),
            )
        self._madvise = ctypes.CDLL(None).madvise
        self._madvise.argtypes = (c_void_p, c_size_t, c_int)
        nothing = np.empty(0, dtype=np.int64)
        self._owned = _Owned([], nothing, nothing)  # replaced as a whole, so that it is read without a lock
        self._pinning = threading.Lock()

    @property
    def batches(self) -> bool:
        """Whether a batch is one call."""
        return self._batch is not None

    def table(self) -> DriverTable:
        library = self._library
        functions = (library.cuCtxSetCurrent, library.cuStreamWaitEvent, library.cuMemcpyAsync, self._batch,
                     library.cuEventRecord, library.cuEventSynchronize)
        return DriverTable(*(None if each is None else ctypes.cast(each, c_void_p) for each in functions))

    def context(self, device: int) -> int:
        """Of a device, the one that torch uses too. Kept until the process ends."""
        context = c_void_p()
        _check("cuDevicePrimaryCtxRetain", self._library.cuDevicePrimaryCtxRetain(byref(context), device))
        assert context.value is not None
        return context.value

    def set_context(self, context: int) -> None:
        _check("cuCtxSetCurrent", self._library.cuCtxSetCurrent(context))

    def make_event(self) -> int:
        """One whose waiting threads sleep, and do not spin; for the current context, until the process ends."""
        event = c_void_p()
        _check("cuEventCreate", self._library.cuEventCreate(byref(event), _BLOCKING_SYNC | _DISABLE_TIMING))
        assert event.value is not None
        return event.value

    def finish(self, stream: int, event: int) -> None:
        """Sleeps until all that is in the stream now has run."""
        _check("cuEventRecord", self._library.cuEventRecord(event, stream))
        _check("cuEventSynchronize", self._library.cuEventSynchronize(event))

    def own(self, address: int, nbytes: int) -> None:
        """From now on `pin` knows this memory, which begins at a page."""
        self._owned = self._owned.with_one(_Slab(address, nbytes))

    def disown(self, address: int) -> None:
        """The memory may go; no copy of it may be running."""
        place = next((i for i, slab in enumerate(self._owned.slabs) if slab.address == address), None)
        if place is None:
            return
        if self._owned.slabs[place].pinned:
            self._library.cuMemHostUnregister(address)
        self._owned = self._owned.without(place)

    def pin(self, addresses: Sequence[int] | npt.NDArray[np.int64]) -> bool:
        """Pins what these lie in, if it is not; whether all of it is pinned. Milliseconds for tens of megabytes. The
        driver refuses where locked memory is limited: then copies are slower and not asynchronous."""
        pinned = True
        for slab in self._owned.find(np.asarray(addresses, dtype=np.int64)):
            if slab.pinned is None:
                with self._pinning:
                    if slab.pinned is None:
                        # The pages are made first, so that the driver, whom launches wait for, is not kept for that.
                        self._madvise(slab.address, slab.nbytes, _POPULATE_WRITE)
                        slab.pinned = self._library.cuMemHostRegister_v2(slab.address, slab.nbytes, _PORTABLE) == 0
            pinned = pinned and slab.pinned
        return pinned

    def copy(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int, batch: bool = True) -> None:
        """Queues copies between host and device addresses, in any order. `batch` is for pinned memory only."""
        if len(targets) == 0:
            return
        if batch and self._batch is not None:
            code = self._copy_batch(targets, sources, sizes, stream)
            if code != _UNSUPPORTED:
                _check("cuMemcpyBatchAsync", code)
                return
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            _check("cuMemcpyAsync", self._library.cuMemcpyAsync(target, source, size, stream))

    def _copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> int:
        assert self._batch is not None
        attributes, first, failed = _CopyAttributes(source_order=_STREAM_ORDER), c_size_t(0), c_size_t(0)
        return int(self._batch(targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(targets),
                               byref(attributes), byref(first), 1, byref(failed), stream))


@cache
def cuda_driver() -> CudaDriver:
    return CudaDriver()


def _check(call: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{call} failed with CUDA error {code}")
