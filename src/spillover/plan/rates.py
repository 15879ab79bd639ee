"""The rates of a machine, from which all limits are computed. Measured by `measure`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Bytes and FLOPs per second. None: does not apply to this device, or was not measured."""

    device: str  # "cpu" | "cuda"
    memory_read: float  # reads of the device's memory, by all cores or the whole GPU
    float32: float  # FLOP/s of matrix products
    bfloat16: float | None = None
    device_copy: float | None = None  # CUDA: bytes read + bytes written
    host_to_device: float | None = None  # CUDA: from pinned memory
    device_to_host: float | None = None
    kernel_read: float | None = None  # CUDA: reads of pinned host memory by a kernel
    host_read: float | None = None  # CUDA: reads of host memory by all cores
    disk_write: float | None = None
    disk_read: float | None = None

    def flops(self, dtype: str) -> float:
        """Return the matrix FLOP/s in a compute type. For 16-bit types on a CPU, float32's rate is returned."""
        return self.bfloat16 if dtype in ("bfloat16", "float16") and self.bfloat16 is not None else self.float32


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second of copies between the device's blocks and host memory."""

    to_host: float
    to_device: float


@dataclass(frozen=True)
class DiskRates:
    """Bytes per second, bypassing the page cache if the file system allows it."""

    write: float
    read: float
