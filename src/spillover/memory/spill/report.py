"""What a KV tier has done since the engine was built, as numbers to show or to take differences of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

COUNTERS = ("bytes_in", "bytes_out", "seconds_in", "seconds_out", "hit_tokens", "failures", "dropped")


@dataclass(frozen=True)
class TierReport:
    """A tier's counters: `in` is towards the tier (a spill), `out` is from it (a restore); seconds of moving bytes."""

    name: str  # "device" | "host" | "pool" | "disk" | "remote", as token sources are named
    blocks: int  # blocks that hold KV now
    capacity_blocks: int | None  # None: not known, as of a remote store without a limit
    bytes_in: int
    bytes_out: int
    seconds_in: float
    seconds_out: float
    hit_tokens: int  # prompt tokens that came from this tier
    failures: int  # stores and loads that failed or came too late
    dropped: int  # blocks that were to be stored here and were not
    available: bool
    link_in: float | None  # measured bytes a second towards the tier; None: not measured
    link_out: float | None

    @property
    def rate_in(self) -> float | None:
        """Return the bytes a second while bytes moved; None before the first."""
        return self.bytes_in / self.seconds_in if self.seconds_in > 0 else None

    @property
    def rate_out(self) -> float | None:
        return self.bytes_out / self.seconds_out if self.seconds_out > 0 else None


def by_name(reports: Iterable[TierReport]) -> tuple[TierReport, ...]:
    """Return tiers of one name, such as two disks, as one: what they hold and did, at the rates of both together."""
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
