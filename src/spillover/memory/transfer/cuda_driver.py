"""The few calls of the CUDA driver that copies and managed memory need, by ctypes. No torch here.

A copy a block through torch would give up and take back the interpreter each time, and wait for whoever has it then:
here a batch is one call. NVIDIA's bindings (cuda-python) would be one
more thing to install and save ten declarations: kernels/native/cuda_copy.cpp needs the addresses of these functions.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char, c_int, c_size_t, c_ubyte, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]

_PORTABLE = 1  # pinned for every context
_STREAM_ORDER = 1  # sources are read when the stream gets there
_BLOCKING_SYNC, _DISABLE_TIMING = 1, 2
_UNSUPPORTED = 801
_EQUAL = 1
_ENABLE_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_POPULATE_WRITE = 23  # Linux 5.14; older ones refuse, which does no harm
_ATTACH_GLOBAL = 1  # managed memory that every stream may use
_HOST = -1  # CU_DEVICE_CPU
_CONCURRENT_MANAGED_ACCESS = 89  # the attribute of a device whose pages move when they are touched
READ_MOSTLY, NOT_READ_MOSTLY, PREFERRED_LOCATION, NO_PREFERRED_LOCATION = 1, 2, 3, 4  # CUmem_advise


class DriverTable(ctypes.Structure):
    """Addresses of functions, as kernels/native/cuda_copy.cpp takes them."""

    _fields_ = tuple((name, c_void_p) for name in (
        "set_context", "write_value", "copy", "copy_batch", "record_event", "synchronize_event",
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


class _SharedMemory(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", c_char * 64),)


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
        """Whether a batch is one call."""
        return self._batch is not None

    def table(self) -> DriverTable:
        library = self._library
        functions = (library.cuCtxSetCurrent, library.cuStreamWriteValue32_v2, library.cuMemcpyAsync, self._batch,
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

    def wait_value(self, stream: int, address: int, value: int) -> None:
        """Let the stream go on once the 32 bits at a device address have this value; also while it is captured."""
        _check("cuStreamWaitValue32", self._library.cuStreamWaitValue32_v2(stream, address, value, _EQUAL))

    def write_value(self, stream: int, address: int, value: int) -> None:
        """Write 32 bits to a device address once the stream gets there, after all that it did before."""
        _check("cuStreamWriteValue32", self._library.cuStreamWriteValue32_v2(stream, address, value, 0))

    def allocate(self, nbytes: int) -> int:
        """Return the address of zeros on the current device that other processes can map. Kept until the process
        ends."""
        address = c_uint64()
        _check("cuMemAlloc", self._library.cuMemAlloc_v2(byref(address), nbytes))
        _check("cuMemsetD8", self._library.cuMemsetD8_v2(address, 0, nbytes))
        self.synchronize()
        return address.value

    def synchronize(self) -> None:
        """Wait for all that the current context has begun."""
        _check("cuCtxSynchronize", self._library.cuCtxSynchronize())

    def share(self, address: int) -> bytes:
        """Return what another process opens this memory with; it was allocated here."""
        shared = _SharedMemory()
        _check("cuIpcGetMemHandle", self._library.cuIpcGetMemHandle(byref(shared), address))
        return bytes(shared)

    def open_shared(self, handle: bytes) -> int:
        """Map what another process shares, of this device or of one that it can reach; returns its address here."""
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
        """Return the bytes that are free on the current device."""
        free, total = c_size_t(), c_size_t()
        _check("cuMemGetInfo", self._library.cuMemGetInfo_v2(byref(free), byref(total)))
        return free.value

    def allocate_managed(self, nbytes: int) -> int:
        """Return the address of memory whose pages are on the current device or the host, wherever they are used."""
        address = c_uint64()
        _check("cuMemAllocManaged", self._library.cuMemAllocManaged(byref(address), nbytes, _ATTACH_GLOBAL))
        return address.value

    def free(self, address: int) -> None:
        _check("cuMemFree", self._library.cuMemFree_v2(address))

    def prefetch(self, address: int, nbytes: int, device: int | None, stream: int) -> None:
        """Move managed pages to a device, or to the host where that is None, in the order of a stream."""
        _check("cuMemPrefetchAsync", self._library.cuMemPrefetchAsync(
            address, nbytes, _HOST if device is None else device, stream))

    def advise(self, address: int, nbytes: int, advice: int) -> None:
        """Give advice on managed pages, at once and in the order of no stream; places are the host."""
        _check("cuMemAdvise", self._library.cuMemAdvise(address, nbytes, advice, _HOST))

    def populate(self, address: int, nbytes: int) -> None:
        self._madvise(address, nbytes, _POPULATE_WRITE)

    def register(self, address: int, nbytes: int) -> bool:
        """Pin host memory from the start of a page; return whether the driver did."""
        return bool(self._library.cuMemHostRegister_v2(address, nbytes, _PORTABLE) == 0)

    def unregister(self, address: int) -> None:
        self._library.cuMemHostUnregister(address)

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


class CudaPinner:
    """Pins memory for a device, on any thread: a memory.transfer.host_pool.Pinner."""

    def __init__(self, device: int) -> None:
        self._driver = cuda_driver()
        self._context = self._driver.context(device)

    def populate(self, address: int, nbytes: int) -> None:
        """Make the pages now; many threads at once are faster than the driver, which would make them too."""
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
