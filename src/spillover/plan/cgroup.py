"""The limits that a container sets for this process, read from cgroup v1 or v2 files.

Limits of ancestors apply too, so every folder from the process's group up to the mount is read; the tightest counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# cgroup v1 stores "no limit" as the largest multiple of a page below 2**63; limits of at least this are no limits.
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class CgroupLimits:
    memory: int | None  # bytes; None: no limit
    memory_free: int | None  # bytes left below the tightest limit, page cache counted as free; None: no limit
    cpus: float | None  # number of cores that the quota allows; None: no limit


def read_limits(membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> CgroupLimits:
    """Read memory and CPU limits. `membership`: file with the process's groups; `root`: mount of the hierarchies."""
    memory: int | None = None
    free: int | None = None
    cpus: float | None = None
    for line in _lines(membership):
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        names = controllers.split(",")
        if hierarchy == "0" and not controllers:
            folders = [*_ancestors(root, path), *_ancestors(root / "unified", path)]
            memories = [_memory_v2(folder) for folder in folders]
            quotas = [_cpus_v2(folder) for folder in folders]
        else:
            memories = [_memory_v1(f) for f in _ancestors(root / "memory", path)] if "memory" in names else []
            mounts = [root / controllers, root / "cpu"]
            quotas = [_cpus_v1(f) for m in mounts for f in _ancestors(m, path)] if "cpu" in names else []
        for found in memories:
            if found is not None:
                limit, used = found
                memory = limit if memory is None else min(memory, limit)
                left = max(0, limit - used)
                free = left if free is None else min(free, left)
        for quota in quotas:
            if quota is not None:
                cpus = quota if cpus is None else min(cpus, quota)
    return CgroupLimits(memory, free, cpus)


def _ancestors(mount: Path, path: str) -> Iterator[Path]:
    """Yield the group's folder and its parents up to the mount. In a container the path may be outside of what is
    mounted: then the mount itself is the group."""
    folder = mount / path.lstrip("/")
    while folder != mount and mount in folder.parents:
        if folder.is_dir():
            yield folder
        folder = folder.parent
    yield mount


def _memory_v2(folder: Path) -> tuple[int, int] | None:
    limit = _number(folder / "memory.max")
    if limit is None:
        return None
    cache = _page_cache(folder, ("inactive_file", "active_file"))
    return limit, max(0, (_number(folder / "memory.current") or 0) - cache)


def _memory_v1(folder: Path) -> tuple[int, int] | None:
    limit = _number(folder / "memory.limit_in_bytes")
    if limit is None or limit >= _UNLIMITED:
        return None
    cache = _page_cache(folder, ("total_inactive_file", "total_active_file"))
    return limit, max(0, (_number(folder / "memory.usage_in_bytes") or 0) - cache)


def _cpus_v2(folder: Path) -> float | None:
    fields = " ".join(_lines(folder / "cpu.max")).split()
    if len(fields) != 2 or not fields[0].isdigit():
        return None
    return int(fields[0]) / int(fields[1])


def _cpus_v1(folder: Path) -> float | None:
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota is not None and quota > 0 and period else None


def _page_cache(folder: Path, names: tuple[str, ...]) -> int:
    fields = (line.split() for line in _lines(folder / "memory.stat"))
    return sum(int(field[1]) for field in fields if len(field) == 2 and field[0] in names)


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    try:
        return int(text)
    except ValueError:  # "max", or no such file
        return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
