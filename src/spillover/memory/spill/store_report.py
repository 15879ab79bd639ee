"""The store's statistics, one report per tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spillover.memory.spill.report import TierReport
from spillover.memory.tiers.base import Tier

LinkRates = Mapping[str, tuple[float | None, float | None]]  # tier -> measured bytes per second towards and from it


@dataclass
class Meter:
    """The bytes copied in one direction over the link, and the time that took."""

    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class HostReport:
    blocks: int
    capacity: int
    to_host: Meter
    to_device: Meter
    failures: int
    dropped: int


def tier_reports(host: HostReport | None, tiers: Sequence[Tier], hits: Mapping[str, int], links: LinkRates,
                 slot_bytes: int, dropped: int) -> list[TierReport]:
    """Report each tier. `dropped`: number of blocks that left the device without a copy, added to the nearest tier."""
    reports = []
    if host is not None:
        link_in, link_out = links.get("host", (None, None))
        reports.append(TierReport(
            name="host", blocks=host.blocks, capacity_blocks=host.capacity, bytes_in=host.to_host.bytes,
            bytes_out=host.to_device.bytes, seconds_in=host.to_host.seconds, seconds_out=host.to_device.seconds,
            hit_tokens=hits.get("host", 0), failures=host.failures, dropped=host.dropped + dropped, available=True,
            link_in=link_in, link_out=link_out,
        ))
    for tier in tiers:
        stats = tier.stats()
        link_in, link_out = links.get(tier.name, (None, None))
        capacity = None if stats.capacity_bytes is None else stats.capacity_bytes // slot_bytes
        reports.append(TierReport(
            name=tier.name, blocks=stats.blocks, capacity_blocks=capacity, bytes_in=stats.bytes_written,
            bytes_out=stats.bytes_read, seconds_in=stats.seconds_writing, seconds_out=stats.seconds_reading,
            hit_tokens=hits.get(tier.name, 0), failures=stats.store_failures + stats.load_failures,
            dropped=dropped if not reports else 0,
            available=stats.available, link_in=link_in, link_out=link_out,
        ))
    return reports
