"""How fast a machine is, as the roofs that every printed number stands under. Timed by `measure`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Bytes and FLOPs a second. None: not there on this device, or not asked for."""

    device: str  # "cpu" | "cuda"
    memory_read: float  # memory that the device computes from, all cores or the whole GPU
    float32: float  # matrix product
    bfloat16: float | None = None
    device_copy: float | None = None  # CUDA: read + write
    host_to_device: float | None = None  # CUDA: pinned
    device_to_host: float | None = None
    kernel_read: float | None = None  # CUDA: pinned host memory, read by a kernel
    host_read: float | None = None  # CUDA: host memory, by all cores
    disk_write: float | None = None
    disk_read: float | None = None

    def flops(self, dtype: str) -> float:
        """Return the matrix FLOP/s in a compute type. A 16-bit type on a CPU is given float32's."""
        return self.bfloat16 if dtype in ("bfloat16", "float16") and self.bfloat16 is not None else self.float32


@dataclass(frozen=True)
class LinkRates:
    """Bytes a second between the device's blocks and host memory."""

    to_host: float
    to_device: float


@dataclass(frozen=True)
class DiskRates:
    """Bytes a second, past the page cache where the file system allows it."""

    write: float
    read: float
