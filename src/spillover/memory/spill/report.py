"""The counters of a KV tier since the engine was created, to show or to take differences of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

COUNTERS = ("bytes_in", "bytes_out", "seconds_in", "seconds_out", "hit_tokens", "failures", "dropped")


@dataclass(frozen=True)
class TierReport:
    """A tier's counters: `in` is towards the tier (a spill), `out` from it (a restore); seconds count moving bytes."""

    name: str  # "device" | "host" | "pool" | "disk" | "remote", as token sources are named
    blocks: int  # number of blocks that have KV now
    capacity_blocks: int | None  # maximum number of blocks; None if unknown, as for a remote store without a limit
    bytes_in: int
    bytes_out: int
    seconds_in: float
    seconds_out: float
    hit_tokens: int  # number of prompt tokens loaded from this tier
    failures: int  # number of stores and loads that failed or missed their deadline
    dropped: int  # number of blocks that should have been stored in this tier and were not
    available: bool
    link_in: float | None  # measured bytes per second towards the tier; None if not measured
    link_out: float | None

    @property
    def rate_in(self) -> float | None:
        """Return bytes per second of the time in which bytes moved towards the tier; None if none have."""
        return self.bytes_in / self.seconds_in if self.seconds_in > 0 else None

    @property
    def rate_out(self) -> float | None:
        return self.bytes_out / self.seconds_out if self.seconds_out > 0 else None


def by_name(reports: Iterable[TierReport]) -> tuple[TierReport, ...]:
    """Merge the reports of tiers with the same name, such as two disks, into one report with summed numbers."""
    merged: dict[str, TierReport] = {}
    for report in reports:
        before = merged.get(report.name)
        merged[report.name] = report if before is None else _together(before, report)
    return tuple(merged.values())


def _together(one: TierReport, other: TierReport) -> TierReport:
    values = {}
    for field in fields(TierReport):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name == "name":
            values[field.name] = a
        elif field.name == "available":
            values[field.name] = a or b
        else:
            values[field.name] = None if a is None or b is None else a + b
    return TierReport(**values)
