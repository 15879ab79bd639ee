"""The resources of this machine: cores, memory and its limits, devices, disk. Nothing is timed here (see `measure`).

torch is imported within functions, as a server's front, which only reads plans and machines, runs without it.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import platform
import resource
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from spillover.cache import cache_root
from spillover.plan.cgroup import read_limits

_PINNED_TRIAL = 1 << 20
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # settings of the user, which take precedence


@dataclass(frozen=True)
class CudaDevice:
    index: int
    name: str
    total: int  # bytes
    free: int  # bytes
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    cpu: str
    cores: int  # number of cores that this process may use, by affinity and the cgroup's quota
    cpu_quota: float | None  # number of cores that the cgroup allows; None: no quota
    memory_total: int  # bytes of RAM
    memory_available: int  # bytes that could be allocated now, within the cgroup's limit
    memory_limit: int | None  # bytes that the cgroup allows; None: no limit
    memlock: int | None  # bytes that this process may lock; None: no limit
    last_level_cache: int  # bytes; 0: not known
    process_bytes: int  # resident bytes of this process now: the interpreter, torch and libraries
    cache_folder: str
    cache_free: int  # free bytes on the disk of cache_folder
    python_version: str
    torch_version: str
    torch_threads: int
    cuda: tuple[CudaDevice, ...] = ()
    pinnable: int | None = None  # bytes that CUDA may pin; None: no limit except the memory

    @property
    def memory(self) -> int:
        """Return the maximum RAM of this process: the machine's, or the cgroup's limit if that is smaller."""
        return self.memory_total if self.memory_limit is None else min(self.memory_total, self.memory_limit)


def probe() -> Machine:
    import torch

    memory = psutil.virtual_memory()
    limits = read_limits()
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = math.ceil(limits.cpus) if limits.cpus is not None else affinity
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    folder = cache_root()
    cuda = _cuda_devices()
    return Machine(
        cpu=_cpu_model(),
        cores=max(1, min(affinity, quota)),
        cpu_quota=limits.cpus,
        memory_total=memory.total,
        memory_available=memory.available if limits.memory_free is None else min(memory.available, limits.memory_free),
        memory_limit=limits.memory if limits.memory is not None and limits.memory < memory.total else None,
        memlock=None if memlock == resource.RLIM_INFINITY else memlock,
        last_level_cache=_last_level_cache(),
        process_bytes=psutil.Process().memory_info().rss,
        cache_folder=str(folder),
        cache_free=_disk_free(folder),
        python_version=platform.python_version(),
        torch_version=torch.__version__,
        torch_threads=torch.get_num_threads(),
        cuda=cuda,
        pinnable=memlock if cuda and memlock != resource.RLIM_INFINITY and _limit_binds_cuda() else None,
    )


def probe_memory() -> tuple[int, int]:
    """Return (maximum, currently available) bytes of RAM for this process; does not import torch."""
    memory, limits = psutil.virtual_memory(), read_limits()
    return (min(memory.total, limits.memory if limits.memory is not None else memory.total),
            min(memory.available, limits.memory_free if limits.memory_free is not None else memory.available))


def trim_heap() -> None:
    """Return freed memory from the allocator to the system: loading leaves holes between the weights."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def _cuda_devices() -> tuple[CudaDevice, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    _keep_no_holes()
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        devices.append(CudaDevice(index, properties.name, total, free, (properties.major, properties.minor)))
    return tuple(devices)


@functools.cache
def _keep_no_holes() -> None:
    """Make torch map device memory page by page, before it allocates any. With its default blocks, the holes between
    allocations of steps of different sizes would take a tenth of the budget in addition to it."""
    import torch

    if any(name in os.environ for name in _ALLOCATOR_SETTINGS):
        return
    with warnings.catch_warnings():  # all releases have this name; the newest deprecates it
        warnings.simplefilter("ignore", FutureWarning)
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")


@functools.cache
def _limit_binds_cuda() -> bool:
    """Return whether CUDA respects the limit on locked memory: most drivers pin pages without counting them.

    Tested by pinning a small piece under an even smaller limit, as exceeding the real limit might use up all memory.
    """
    import torch

    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memory = mmap.mmap(-1, _PINNED_TRIAL)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    torch.cuda.init()  # type: ignore[no-untyped-call]
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (min(soft, _PINNED_TRIAL // 2), hard))
    try:
        refused = int(runtime.cudaHostRegister(address, _PINNED_TRIAL, 0)) != 0
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    if not refused:
        runtime.cudaHostUnregister(address)
    return refused


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Hardware", "cpu model"):
            return value.strip()
    return platform.processor() or platform.machine()


def _last_level_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    sizes = []
    for path in folder.glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1024, "M": 1024**2}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes, default=0)


def _disk_free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
