"""Disk tiers as the tests open them: small payloads and small segments."""

import os
from pathlib import Path
from typing import Any

from spillover.memory.tiers.disk import DiskTier
from spillover.memory.tiers.recovery import FIXED_BYTES, segment_cost
from support.tier_calls import DESCRIPTION, IDENTITY, block_bytes, block_key, no_wake

PAYLOAD = 5000  # bytes; not a multiple of a page
SLOTS = 4  # slots per segment


def room_for(slots: int, payload_bytes: int = PAYLOAD, per_segment: int = SLOTS) -> int:
    """Return the capacity in bytes that holds exactly `slots` blocks."""
    whole, rest = divmod(slots, per_segment)
    last = segment_cost(rest, payload_bytes) if rest else 0
    return FIXED_BYTES + whole * segment_cost(per_segment, payload_bytes) + last


def open_disk(path: Path, slots: int = 10, **changes: Any) -> DiskTier:
    settings: dict[str, Any] = {
        "capacity_bytes": room_for(slots),
        "payload_bytes": PAYLOAD,
        "identity": IDENTITY,
        "description": DESCRIPTION,
        "wake": no_wake,
        "segment_bytes": SLOTS * 8192,
    } | changes
    return DiskTier(path, **settings)


def some_blocks(*numbers: int, nbytes: int = PAYLOAD) -> dict[bytes, bytes]:
    return {block_key(number): block_bytes(number, nbytes) for number in numbers}


def bytes_under(path: Path) -> int:
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(path) for name in names)
