"""How fast this machine really is, timed fresh each time: the roofs that every printed number stands under.

The median over a stretch of repeats is kept: what the machine sustains, not what it reaches for an instant.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from spillover.errors import SpilloverError
from spillover.plan.hardware import Machine, probe

_DISK_CHUNK = 16 << 20


@dataclass(frozen=True)
class Rates:
    """Bytes and FLOPs a second. None: not there on this device, or not asked for."""

    device: str  # "cpu" | "cuda"
    memory_read: float  # of the memory the device computes from, all cores or the whole GPU
    float32: float  # matrix product
    bfloat16: float | None = None
    device_copy: float | None = None  # CUDA: read + write
    host_to_device: float | None = None  # CUDA: pinned
    device_to_host: float | None = None
    disk_write: float | None = None
    disk_read: float | None = None

    def flops(self, dtype: str) -> float:
        """Matrix FLOP/s in a compute type. A 16-bit type on a CPU has no roof of its own: it is given float32's."""
        return self.bfloat16 if dtype in ("bfloat16", "float16") and self.bfloat16 is not None else self.float32


def measure_rates(device: str = "cpu", seconds: float = 2.0, disk: Path | None = None) -> Rates:
    """Times this machine for about `seconds`, half of it on memory and half on matrix products."""
    machine = probe()
    if device == "cuda":
        if not machine.cuda:
            raise SpilloverError("This machine has no CUDA device that torch can see; use --device cpu")
        rates = _cuda_rates(machine, seconds)
        torch.cuda.empty_cache()  # or the next plan would find that memory taken
    else:
        rates = Rates("cpu", _cpu_read(machine, seconds / 2), _matrix_rate(2048, torch.float32, "cpu", seconds / 2))
    if disk is None:
        return rates
    written, read = measure_disk(disk)
    return replace(rates, disk_write=written, disk_read=read)


def read_size(machine: Machine) -> int:
    """Bytes to read through: four times the last cache so that it holds little of them, within an eighth of the RAM."""
    return max(1 << 20, min(max(512 << 20, 4 * machine.last_level_cache), machine.memory_available // 8))


def _cpu_read(machine: Machine, seconds: float) -> float:
    """The faster of a reduction and a matrix-vector product: which of them that is differs between CPUs."""
    columns = 16384
    rows = max(1, read_size(machine) // (4 * columns))
    data = torch.empty(rows, columns).fill_(1.0)  # written, or the kernel would hand out one shared page of zeros
    vector, out = torch.ones(columns), torch.empty(rows)

    def product() -> None:
        torch.mv(data, vector, out=out)

    best = min(_sustained(product, seconds / 2), _sustained(data.sum, seconds / 2))
    return data.nbytes / best


def _matrix_rate(size: int, dtype: torch.dtype, device: str, seconds: float) -> float:
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty(size, size, device=device, dtype=dtype)
    return 2 * size**3 / _sustained(lambda: torch.mm(a, b, out=out), seconds, device)


def _cuda_rates(machine: Machine, seconds: float) -> Rates:
    share = seconds / 4
    read, copied = _cuda_memory(machine, share)
    sent, fetched = _cuda_link(machine, share)
    return Rates(
        device="cuda",
        memory_read=max(read, copied),
        float32=_matrix_rate(8192, torch.float32, "cuda", share),
        bfloat16=_matrix_rate(8192, torch.bfloat16, "cuda", share),
        device_copy=copied,
        host_to_device=sent,
        device_to_host=fetched,
    )


def _cuda_memory(machine: Machine, seconds: float) -> tuple[float, float]:
    """(read, copy) within the device; a copy counts the bytes read and those written."""
    source = torch.zeros(min(4 << 30, machine.cuda[0].free // 8) // 4, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / _sustained(lambda: target.copy_(source), seconds / 2, "cuda")
    return source.nbytes / _sustained(source.sum, seconds / 2, "cuda"), copied


def _cuda_link(machine: Machine, seconds: float) -> tuple[float, float]:
    """(host to device, device to host) from pinned memory."""
    count = min(256 << 20, machine.memory_available // 8) // 4
    host, device = torch.zeros(count, pin_memory=True), torch.zeros(count, device="cuda")
    sent = host.nbytes / _sustained(lambda: device.copy_(host, non_blocking=True), seconds / 2, "cuda")
    return sent, host.nbytes / _sustained(lambda: host.copy_(device, non_blocking=True), seconds / 2, "cuda")


def _sustained(run: Callable[[], object], seconds: float, device: str = "cpu") -> float:
    """Median seconds of a run. One untimed run first; then at least three, until `seconds` are used up."""
    run()
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < deadline:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return max(statistics.median(times), 1e-9)


def measure_disk(folder: Path, size: int = 256 << 20) -> tuple[float, float]:
    """(write, read) rate of the disk under `folder`, past the page cache where the file system allows it."""
    free = psutil.disk_usage(str(folder)).free if folder.is_dir() else None
    if free is None:
        raise SpilloverError(f"--disk {folder} is not a folder; name one on the disk to measure")
    chunks = min(size, free // 4) // _DISK_CHUNK
    if chunks == 0:
        raise SpilloverError(f"--disk {folder} has too little free space to measure; name a folder on another disk")
    with tempfile.NamedTemporaryFile(dir=folder, prefix="spill-doctor-") as file:
        buffer = mmap.mmap(-1, _DISK_CHUNK)  # page aligned, as direct I/O wants it
        buffer.write(os.urandom(_DISK_CHUNK))
        written = _disk_pass(file.name, os.O_WRONLY, lambda handle: os.writev(handle, [buffer]), chunks)
        read = _disk_pass(file.name, os.O_RDONLY, lambda handle: os.readv(handle, [buffer]), chunks)
    return chunks * _DISK_CHUNK / written, chunks * _DISK_CHUNK / read


def _disk_pass(path: str, mode: int, step: Callable[[int], int], chunks: int) -> float:
    try:
        handle = os.open(path, mode | getattr(os, "O_DIRECT", 0))
    except OSError:  # not every file system takes direct I/O
        handle = os.open(path, mode)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        for _ in range(chunks):
            step(handle)
        os.fsync(handle)
        return max(time.perf_counter() - start, 1e-9)
    finally:
        os.close(handle)
