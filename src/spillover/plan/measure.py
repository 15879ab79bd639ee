"""Measurement of this machine's rates, from which all printed limits are computed; nothing is cached on disk.

A rate is the median of repeated runs: what the machine sustains, not its peak.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from spillover.errors import SpilloverError
from spillover.kernels.moe.page_table import Resolution
from spillover.kernels.moe.paging import gather
from spillover.memory.shared_pool.tier import pool_threads
from spillover.memory.tiers.base import checksum
from spillover.plan.hardware import Machine, probe
from spillover.plan.rates import DiskRates, LinkRates, Rates

_DISK_CHUNK = 4 << 20
_LINK_BYTES = 64 << 20  # bytes copied to time a link: more than the caches on either side
_QUICK_SECONDS = 0.6  # time for measurements when a plan must choose a strategy before loading


def measure_rates(device: str = "cpu", seconds: float = 2.0, disk: Path | None = None) -> Rates:
    """Measure this machine for about `seconds`: memory, matrix products, and the link on CUDA; then `disk` if given."""
    machine = probe()
    if device == "cuda":
        if not machine.cuda:
            raise SpilloverError("This machine has no CUDA device that torch can see; use --device cpu")
        rates = _cuda_rates(machine, seconds)
        torch.cuda.empty_cache()  # otherwise the next plan would count that memory as used
    else:
        rates = Rates("cpu", _cpu_read(machine, seconds / 2), _matrix_rate(2048, torch.float32, "cpu", seconds / 2))
    if disk is None:
        return rates
    measured = measure_disk(disk, size=256 << 20, seconds=2.0)
    return replace(rates, disk_write=measured.write, disk_read=measured.read)


@functools.cache
def quick_rates(device: str) -> Rates:
    """Measure briefly, once per process, the rates for choosing a strategy, including those of copies on a CPU."""
    rates = measure_rates(device, _QUICK_SECONDS)
    if device == "cpu":
        rates = replace(rates, host_to_device=measure_link("cpu", 1 << 20).to_device)
    return rates


def read_size(machine: Machine) -> int:
    """Return the bytes to read in a measurement: four times the last-level cache, at most 1/8 of available RAM."""
    return max(1 << 20, min(max(512 << 20, 4 * machine.last_level_cache), machine.memory_available // 8))


def _cpu_read(machine: Machine, seconds: float) -> float:
    """Return the rate of a reduction or a matrix-vector product, whichever is faster: that differs between CPUs."""
    columns = 16384
    rows = max(1, read_size(machine) // (4 * columns))
    data = torch.empty(rows, columns).fill_(1.0)  # written, as otherwise the kernel maps one shared page of zeros
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
    share = seconds / 6
    read, copied = _cuda_memory(machine, share)
    sent, fetched = _cuda_link(min(256 << 20, machine.memory_available // 8), share)
    return Rates(
        device="cuda",
        memory_read=max(read, copied),
        float32=_matrix_rate(8192, torch.float32, "cuda", share),
        bfloat16=_matrix_rate(8192, torch.bfloat16, "cuda", share),
        device_copy=copied,
        host_to_device=sent,
        device_to_host=fetched,
        kernel_read=_kernel_read(share),
        host_read=_cpu_read(machine, share),
    )


def _cuda_memory(machine: Machine, seconds: float) -> tuple[float, float]:
    """Return the (read, copy) rates of device memory; a copy counts the bytes read and the bytes written."""
    source = torch.zeros(min(4 << 30, machine.cuda[0].free // 8) // 4, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / _sustained(lambda: target.copy_(source), seconds / 2, "cuda")
    return source.nbytes / _sustained(source.sum, seconds / 2, "cuda"), copied


def _cuda_link(nbytes: int, seconds: float) -> tuple[float, float]:
    """Return the (host to device, device to host) rates with pinned memory."""
    count = nbytes // 4
    host, device = torch.zeros(count, pin_memory=True), torch.zeros(count, device="cuda")
    sent = host.nbytes / _sustained(lambda: device.copy_(host, non_blocking=True), seconds / 2, "cuda")
    return sent, host.nbytes / _sustained(lambda: host.copy_(device, non_blocking=True), seconds / 2, "cuda")


def _kernel_read(seconds: float) -> float:
    """Return the rate at which a kernel reads pinned host memory, as when a step fetches missing experts."""
    count = 8
    records = torch.zeros(count, _LINK_BYTES // count, dtype=torch.uint8, pin_memory=True)
    slots = torch.empty_like(records, device="cuda")
    order = torch.arange(count, dtype=torch.int32, device="cuda")
    none = torch.zeros(count, 4, dtype=torch.int32, device="cuda")
    all_of_them = Resolution(torch.tensor([count, 0], dtype=torch.int32, device="cuda"),
                             torch.stack([order, order], 1), none, none[:, 0])
    return records.nbytes / _sustained(lambda: gather(all_of_them, records, slots), seconds, "cuda")


def _sustained(run: Callable[[], object], seconds: float, device: str = "cpu", warm: bool = False) -> float:
    """Return the median seconds of a run, of at least three runs and about `seconds` in total, after an untimed run
    unless `warm`."""
    if not warm:
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


def measure_link(device: str, block_bytes: int, seconds: float = 0.1) -> LinkRates:
    """Measure copies for about `seconds`: block by block on a CPU, in large pieces from pinned memory on CUDA."""
    if device == "cuda":
        sent, fetched = _cuda_link(_LINK_BYTES, seconds)
        torch.cuda.empty_cache()  # otherwise the next plan would count that memory as used
        return LinkRates(to_host=fetched, to_device=sent)
    count = max(2, min(_LINK_BYTES, psutil.virtual_memory().available // 16) // block_bytes)
    near, far = (mmap.mmap(-1, count * block_bytes) for _ in range(2))
    source, target = (ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (near, far))
    ctypes.memset(source, 1, count * block_bytes)
    ctypes.memset(target, 1, count * block_bytes)

    def copy_all() -> None:
        for offset in range(0, count * block_bytes, block_bytes):
            ctypes.memmove(target + offset, source + offset, block_bytes)

    rate = count * block_bytes / _sustained(copy_all, seconds, warm=True)
    return LinkRates(rate, rate)  # copies within RAM have one rate in both directions


def measure_pool(device: str, block_bytes: int, seconds: float = 0.05) -> LinkRates:
    """Measure the work of an engine's threads per block of a shared pool: a copy over the link, and a checksum."""
    link, threads = measure_link(device, block_bytes, seconds), pool_threads()
    block = memoryview(mmap.mmap(-1, block_bytes))
    summed = block_bytes / _sustained(lambda: checksum(block), seconds, warm=True)
    return LinkRates(*(min(rate, threads / (1 / rate + 1 / summed)) for rate in (link.to_host, link.to_device)))


def measure_disk(folder: Path, size: int = 64 << 20, seconds: float = 0.12) -> DiskRates:
    """Measure writes and reads of a temporary file of up to `size` bytes in `folder`, for about `seconds` each."""
    free = psutil.disk_usage(str(folder)).free if folder.is_dir() else None
    if free is None:
        raise SpilloverError(f"--disk {folder} is not a folder; name one on the disk to measure")
    chunks = min(size, free // 4) // _DISK_CHUNK
    if chunks == 0:
        raise SpilloverError(f"--disk {folder} has too little free space to measure; name a folder on another disk")
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="spill-rate-") as file:
            buffer = mmap.mmap(-1, _DISK_CHUNK)  # page aligned, as direct I/O requires
            buffer.write(os.urandom(_DISK_CHUNK))
            done, written = _disk_pass(file.name, os.O_WRONLY, lambda handle: os.writev(handle, [buffer]), chunks,
                                       seconds)
            again, read = _disk_pass(file.name, os.O_RDONLY, lambda handle: os.readv(handle, [buffer]), done, seconds)
    except OSError as error:
        raise SpilloverError(f"--disk {folder} cannot be written ({error.strerror}); name another folder") from error
    return DiskRates(done * _DISK_CHUNK / written, again * _DISK_CHUNK / read)


def _disk_pass(path: str, mode: int, step: Callable[[int], int], chunks: int, seconds: float) -> tuple[int, float]:
    """Return (chunks done, seconds taken): all chunks, or as many as the time allows."""
    try:
        handle = os.open(path, mode | getattr(os, "O_DIRECT", 0))
    except OSError:  # not every file system supports direct I/O
        handle = os.open(path, mode)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        start, done = time.perf_counter(), 0
        while done < chunks and (done == 0 or time.perf_counter() - start < seconds):
            step(handle)
            done += 1
        os.fsync(handle)
        return done, max(time.perf_counter() - start, 1e-9)
    finally:
        os.close(handle)
