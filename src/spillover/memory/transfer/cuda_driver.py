"""The few CUDA driver calls that copies and managed memory need, by ctypes and without torch.

One torch copy per block would release and reacquire the GIL each time, and wait for other threads that hold it; here a
batch is one call. NVIDIA's bindings (cuda-python) would be one more dependency and save only ten declarations:
kernels/native/cuda_copy.cpp needs the addresses of these functions.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char, c_int, c_size_t, c_ubyte, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache

import numpy as np
import numpy.typing as npt

from spillover.kernels.huge_pages import POPULATE_WRITE

Addresses = npt.NDArray[np.uint64]

_PORTABLE = 1  # memory is pinned for every context
_STREAM_ORDER = 1  # sources are read when the stream reaches the copy
_BLOCKING_SYNC, _DISABLE_TIMING = 1, 2
_UNSUPPORTED = 801
_EQUAL = 1
_ENABLE_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_ATTACH_GLOBAL = 1  # managed memory that every stream may use
_HOST = -1  # CU_DEVICE_CPU
_CONCURRENT_MANAGED_ACCESS = 89  # attribute of devices to which pages move when touched
READ_MOSTLY, NOT_READ_MOSTLY, PREFERRED_LOCATION, NO_PREFERRED_LOCATION = 1, 2, 3, 4  # CUmem_advise


class DriverTable(ctypes.Structure):
    """The addresses of driver functions in the layout that kernels/native/cuda_copy.cpp expects."""

    _fields_ = tuple((name, c_void_p) for name in (
        "set_context", "write_value", "copy", "copy_batch", "record_event", "synchronize_event",
    ))


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes; the location hints apply only to managed memory, which the driver migrates."""

    _fields_ = (
        ("source_order", c_int),
        ("source_type", c_int),
        ("source_id", c_int),
        ("target_type", c_int),
        ("target_id", c_int),
        ("flags", c_uint),
    )


class _SharedMemory(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", c_char * 64),)


class CudaDriver:
    """The CUDA driver. Calls that act on a device need its context to be current in the thread, see set_context()."""

    def __init__(self) -> None:
        library = self._library = ctypes.CDLL("libcuda.so.1")
        for name, arguments in {
            "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
            "cuMemHostUnregister": (c_void_p,),
            "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
            "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
            "cuCtxSetCurrent": (c_void_p,),
            "cuStreamWaitValue32_v2": (c_void_p, c_uint64, c_uint32, c_uint),
            "cuStreamWriteValue32_v2": (c_void_p, c_uint64, c_uint32, c_uint),
            "cuEventCreate": (POINTER(c_void_p), c_uint),
            "cuEventRecord": (c_void_p, c_void_p),
            "cuEventSynchronize": (c_void_p,),
            "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
            "cuMemsetD8_v2": (c_uint64, c_ubyte, c_size_t),
            "cuIpcGetMemHandle": (POINTER(_SharedMemory), c_uint64),
            "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), _SharedMemory, c_uint),
            "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
            "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
            "cuMemAllocManaged": (POINTER(c_uint64), c_size_t, c_uint),
            "cuMemFree_v2": (c_uint64,),
            "cuMemPrefetchAsync": (c_uint64, c_size_t, c_int, c_void_p),
            "cuMemAdvise": (c_uint64, c_size_t, c_int, c_int),
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

    @property
    def batches(self) -> bool:
        """Return whether a batch of copies is one driver call."""
        return self._batch is not None

    def table(self) -> DriverTable:
        library = self._library
        functions = (library.cuCtxSetCurrent, library.cuStreamWriteValue32_v2, library.cuMemcpyAsync, self._batch,
                     library.cuEventRecord, library.cuEventSynchronize)
        return DriverTable(*(None if each is None else ctypes.cast(each, c_void_p) for each in functions))

    def context(self, device: int) -> int:
        """Return a device's primary context, which torch uses too. It is retained until the process ends."""
        context = c_void_p()
        _check("cuDevicePrimaryCtxRetain", self._library.cuDevicePrimaryCtxRetain(byref(context), device))
        assert context.value is not None
        return context.value

    def set_context(self, context: int) -> None:
        _check("cuCtxSetCurrent", self._library.cuCtxSetCurrent(context))

    def make_event(self) -> int:
        """Create an event of the current context whose waiters sleep instead of spinning; it is never destroyed."""
        event = c_void_p()
        _check("cuEventCreate", self._library.cuEventCreate(byref(event), _BLOCKING_SYNC | _DISABLE_TIMING))
        assert event.value is not None
        return event.value

    def finish(self, stream: int, event: int) -> None:
        """Sleep until all work queued so far in the stream has completed."""
        _check("cuEventRecord", self._library.cuEventRecord(event, stream))
        _check("cuEventSynchronize", self._library.cuEventSynchronize(event))

    def wait_value(self, stream: int, address: int, value: int) -> None:
        """Make the stream wait until the 32 bits at a device address have this value; this can be captured."""
        _check("cuStreamWaitValue32", self._library.cuStreamWaitValue32_v2(stream, address, value, _EQUAL))

    def write_value(self, stream: int, address: int, value: int) -> None:
        """Write 32 bits to a device address in stream order, after all earlier work of the stream."""
        _check("cuStreamWriteValue32", self._library.cuStreamWriteValue32_v2(stream, address, value, 0))

    def allocate(self, nbytes: int) -> int:
        """Allocate zeroed memory on the current device that other processes can map; return its address. It is never
        freed."""
        address = c_uint64()
        _check("cuMemAlloc", self._library.cuMemAlloc_v2(byref(address), nbytes))
        _check("cuMemsetD8", self._library.cuMemsetD8_v2(address, 0, nbytes))
        self.synchronize()
        return address.value

    def synchronize(self) -> None:
        """Wait for all work of the current context."""
        _check("cuCtxSynchronize", self._library.cuCtxSynchronize())

    def share(self, address: int) -> bytes:
        """Return a handle with which another process can open memory from allocate()."""
        shared = _SharedMemory()
        _check("cuIpcGetMemHandle", self._library.cuIpcGetMemHandle(byref(shared), address))
        return bytes(shared)

    def open_shared(self, handle: bytes) -> int:
        """Map memory that another process shares, of this device or a peer; return its address in this process."""
        address = c_uint64()
        _check("cuIpcOpenMemHandle", self._library.cuIpcOpenMemHandle_v2(
            byref(address), _SharedMemory.from_buffer_copy(handle), _ENABLE_PEERS))
        return address.value

    def moves_pages(self, device: int) -> bool:
        """Return whether pages of managed memory move to a device when it touches them."""
        value = c_int()
        _check("cuDeviceGetAttribute",
               self._library.cuDeviceGetAttribute(byref(value), _CONCURRENT_MANAGED_ACCESS, device))
        return value.value != 0

    def free_memory(self) -> int:
        """Return the number of free bytes on the current device."""
        free, total = c_size_t(), c_size_t()
        _check("cuMemGetInfo", self._library.cuMemGetInfo_v2(byref(free), byref(total)))
        return free.value

    def allocate_managed(self, nbytes: int) -> int:
        """Allocate memory whose pages move between the current device and the host on use; return its address."""
        address = c_uint64()
        _check("cuMemAllocManaged", self._library.cuMemAllocManaged(byref(address), nbytes, _ATTACH_GLOBAL))
        return address.value

    def free(self, address: int) -> None:
        _check("cuMemFree", self._library.cuMemFree_v2(address))

    def prefetch(self, address: int, nbytes: int, device: int | None, stream: int) -> None:
        """Move managed pages to a device, or to the host if it is None, in stream order."""
        _check("cuMemPrefetchAsync", self._library.cuMemPrefetchAsync(
            address, nbytes, _HOST if device is None else device, stream))

    def advise(self, address: int, nbytes: int, advice: int) -> None:
        """Advise the driver on managed pages, immediately and not in stream order; the location is the host."""
        _check("cuMemAdvise", self._library.cuMemAdvise(address, nbytes, advice, _HOST))

    def populate(self, address: int, nbytes: int) -> None:
        self._madvise(address, nbytes, POPULATE_WRITE)  # older kernels refuse it, which is harmless

    def register(self, address: int, nbytes: int) -> bool:
        """Pin page-aligned host memory; return whether the driver accepted it."""
        return bool(self._library.cuMemHostRegister_v2(address, nbytes, _PORTABLE) == 0)

    def unregister(self, address: int) -> None:
        self._library.cuMemHostUnregister(address)

    def copy(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int, batch: bool = True) -> None:
        """Queue copies between host and device addresses, in any order. `batch` is for pinned memory only."""
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


class CudaPinner:
    """A memory.transfer.host_pool.Pinner for a CUDA device, usable on any thread."""

    def __init__(self, device: int) -> None:
        self._driver = cuda_driver()
        self._context = self._driver.context(device)

    def populate(self, address: int, nbytes: int) -> None:
        """Populate the pages now; doing this on many threads is faster than leaving it to the driver."""
        self._driver.populate(address, nbytes)

    def register(self, address: int, nbytes: int) -> bool:
        self._driver.set_context(self._context)
        return self._driver.register(address, nbytes)

    def unregister(self, address: int) -> None:
        self._driver.set_context(self._context)
        self._driver.unregister(address)


@cache
def cuda_driver() -> CudaDriver:
    return CudaDriver()


def _check(call: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{call} failed with CUDA error {code}")
