"""The tiers below the device: the number of KV blocks that each budget holds, and checks against the machine."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from spillover.errors import PlanError, SpilloverError
from spillover.memory.budgets import DiskBudget
from spillover.memory.shared_pool.client import PoolUnavailableError, ask_owner
from spillover.memory.shared_pool.index import LEAST_SLABS, slab_size
from spillover.memory.shared_pool.wire import Ask, Report
from spillover.memory.tiers.record import HEADER_BYTES
from spillover.memory.tiers.recovery import FIXED_BYTES, segment_cost
from spillover.memory.tiers.remote_address import RemoteAddress
from spillover.plan.hardware import Machine
from spillover.units import format_bytes

PAGE = 4096  # alignment of host slots, so that direct I/O can read into them
STAGING_BLOCKS = 32  # host slots through which blocks are copied to lower tiers if there is no host tier
EAGER_STAGING_BLOCKS = 128  # the same with eager spilling: the blocks of a step of 2,048 tokens
EAGER_STAGING_BYTES = 256 << 20  # maximum bytes of staging slots with eager spilling
POOL_SECONDS = 2.0  # timeout for an answer of a shared pool's owner


@dataclass(frozen=True)
class TierPlan:
    name: str  # "host" | "pool" | "disk" | "remote"
    place: str  # folder, address without password, or kind of memory
    bytes: int | None  # capacity; None: not known to this engine
    blocks: int | None
    write: float | None = None  # bytes per second; None: not measured
    read: float | None = None
    note: str = ""


def plan_tiers(host_memory: int | None, host_pool: Path | None, disks: tuple[DiskBudget, ...], remote: str | None,
               slot_bytes: int, device: str) -> tuple[TierPlan, ...]:
    """Plan the lower tiers, nearest first. `slot_bytes`: bytes of a block in lower tiers."""
    tiers = []
    if host_memory is not None:
        blocks = host_memory // slot_stride(slot_bytes)
        _check_holds_one("--host-memory", host_memory, blocks, slot_stride(slot_bytes))
        tiers.append(TierPlan("host", "pinned RAM" if device == "cuda" else "RAM", host_memory, blocks))
    if host_pool is not None:
        tiers.append(_plan_pool(host_pool, slot_bytes))
    for disk in disks:
        least = FIXED_BYTES + segment_cost(1, slot_bytes)
        _check_usable(disk.path)
        _check_holds_one(f"--disk {disk.path}", disk.capacity_bytes, disk.capacity_bytes // least, least)
        blocks = max(1, (disk.capacity_bytes - FIXED_BYTES - 2 * PAGE) // (segment_cost(16, slot_bytes) // 16))
        tiers.append(TierPlan("disk", str(disk.path), disk.capacity_bytes, blocks, note=_shortage(disk)))
    if remote is not None:
        address, value_bytes = RemoteAddress.parse(remote), HEADER_BYTES + slot_bytes
        held = None if address.size is None else address.size // value_bytes
        if held is not None:
            _check_holds_one(f"--remote {address.shown}", address.size or 0, held, value_bytes)
        tiers.append(TierPlan("remote", address.shown, address.size, held))
    return tuple(tiers)


def _plan_pool(path: Path, slot_bytes: int) -> TierPlan:
    """Plan the shared pool by asking its owner. An owner that does not run may start later; this is not an error."""
    try:
        report = ask_owner(path, Ask(), Report, POOL_SECONDS)
    except PoolUnavailableError as error:
        return TierPlan("pool", str(path), None, None, note=f"{error}; `spill pool serve` starts one")
    blocks = report.capacity // slab_size(report.capacity) * (slab_size(report.capacity) // slot_stride(slot_bytes))
    _check_holds_one(f"--host-pool {path}", report.capacity, blocks, LEAST_SLABS * slot_stride(slot_bytes))
    return TierPlan("pool", str(path), report.capacity, blocks,
                    note=f"shared with {report.engines} other engines" if report.engines else "")


def staging_blocks(slot_bytes: int, spill: str) -> int:
    """Return the number of staging slots of an engine without a host tier. `spill`: when blocks are spilled."""
    if spill != "eager":
        return STAGING_BLOCKS
    return max(STAGING_BLOCKS, min(EAGER_STAGING_BLOCKS, EAGER_STAGING_BYTES // slot_stride(slot_bytes)))


def host_bytes(tiers: tuple[TierPlan, ...], slot_bytes: int, spill: str = "evict") -> int:
    """Return the maximum RAM of the lower tiers: that of the host tier, or of the staging slots for the others."""
    if not tiers:
        return 0
    given = next((tier.bytes for tier in tiers if tier.name == "host"), None)
    return staging_blocks(slot_bytes, spill) * slot_stride(slot_bytes) if given is None else given


def check_host_memory(host_memory: int | None, machine: Machine, device: str, size: str, least: str) -> None:
    """Refuse a host tier that does not fit. `size`, `least`: the budget and the available memory as flag values."""
    if host_memory is None:
        return
    if host_memory > machine.memory_available:
        limit = " allowed by the cgroup" if machine.memory_limit is not None else ""
        raise PlanError(
            f"--host-memory is {size} but {format_bytes(machine.memory_available)} of the "
            f"{format_bytes(machine.memory)} of RAM{limit} are available; lower it to at most {least}"
        )
    if device == "cuda" and machine.pinnable is not None and host_memory > machine.pinnable:
        raise PlanError(
            f"--host-memory is {size} but only {format_bytes(machine.pinnable)} may be pinned; type "
            f"`ulimit -l unlimited` (a container: `--ulimit memlock=-1`) or lower --host-memory"
        )


def with_tier_rates(tiers: tuple[TierPlan, ...], device: str, slot_bytes: int) -> tuple[TierPlan, ...]:
    """Return the tiers with their rates, measured now; for a folder that does not exist, its nearest parent is timed.

    A disk that is full or not writable gets no rate, but may hold blocks.
    """
    from spillover.plan.measure import measure_disk, measure_link, measure_pool

    timed = []
    for tier in tiers:
        if tier.name == "host":
            link = measure_link(device, slot_bytes)
            tier = replace(tier, write=link.to_host, read=link.to_device)
        elif tier.name == "pool":
            pool = measure_pool(device, slot_bytes)
            tier = replace(tier, write=pool.to_host, read=pool.to_device)
        elif tier.name == "disk":
            with contextlib.suppress(SpilloverError):
                disk = measure_disk(_existing(Path(tier.place)))
                tier = replace(tier, write=disk.write, read=disk.read)
        timed.append(tier)
    return tuple(timed)


def slot_stride(slot_bytes: int) -> int:
    return -(-slot_bytes // PAGE) * PAGE


def _check_holds_one(flag: str, given: int, blocks: int, least: int) -> None:
    if blocks < 1:
        raise PlanError(f"{flag} of {format_bytes(given)} holds no KV block; give it at least {format_bytes(least)} "
                        f"({least} bytes)")


def _check_usable(path: Path) -> None:
    """Check a folder before a model is loaded; errors that only a write can show are found when the tier is opened."""
    folder = _existing(path)
    reason = None
    if folder != path and os.path.lexists(folder / path.relative_to(folder).parts[0]):
        reason = "it is a file, or inside a file"
    elif not os.access(folder, os.W_OK | os.X_OK) and (folder != path or not any(path.iterdir())):
        reason = f"this user may not write to {folder}"
    if reason is not None:
        raise PlanError(f"--disk {path} cannot be used: {reason}; give a folder that can be written")


def _shortage(disk: DiskBudget) -> str:
    """Return a note on too little free space, which is no error as it may change while the engine runs."""
    folder = _existing(disk.path)
    free = shutil.disk_usage(folder).free
    held = sum(file.stat().st_size for file in disk.path.rglob("*") if file.is_file()) if folder == disk.path else 0
    return f"only {format_bytes(free + held)} is free there" if disk.capacity_bytes > free + held else ""


def _existing(folder: Path) -> Path:
    while not folder.is_dir():
        folder = folder.parent
    return folder
