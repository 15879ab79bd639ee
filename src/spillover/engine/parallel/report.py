"""Counters of the calls in which ranks meet, for the metrics page and for results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the server's front imports this module and must not load torch
    from torch import Tensor


@dataclass(frozen=True)
class RanksReport:
    """Counters of rank 0 since the start of the engine."""

    size: int = 1
    calls: int = 0  # number of calls in which ranks met: sums, gathered logits, sampled tokens
    bytes: int = 0  # bytes that rank 0 contributed to these calls
    seconds: float = 0.0  # seconds that rank 0 spent in these calls, including waits for slower ranks
    expert_rows: tuple[int, ...] = ()  # by rank: rows routed to its experts; () without expert parallelism


ONE = RanksReport()


def expert_rows(expert_rows: Tensor) -> tuple[int, ...]:
    """Return the rows routed to each rank's experts; () if none were counted."""
    rows = tuple(expert_rows.tolist())
    return rows if any(rows) else ()
