"""The budget of a disk tier, as it is written on the command line."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from spillover.errors import SpilloverError
from spillover.units import parse_bytes


@dataclass(frozen=True)
class DiskBudget:
    path: Path  # absolute path of the folder
    capacity_bytes: int


def parse_disk(text: str) -> DiskBudget:
    """Parse '/nvme/kv:200GB'; the size follows the last colon, so the path itself may contain colons."""
    path, colon, size = text.rpartition(":")
    if not colon or not path or not size.strip():
        raise SpilloverError(f"--disk takes PATH:SIZE, such as /nvme/kv:200GB; got '{text}'")
    try:
        capacity = parse_bytes(size)
    except SpilloverError:
        raise SpilloverError(f"--disk takes PATH:SIZE, such as /nvme/kv:200GB; '{size}' in '{text}' is not a "
                             "size") from None
    if capacity <= 0:
        raise SpilloverError(f"--disk needs a size above 0; got '{text}'")
    return DiskBudget(Path(os.path.abspath(Path(path).expanduser())), capacity)
