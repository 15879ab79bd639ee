"""What ranks have done together, as numbers for pages and results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the server's front reads reports, and does without torch
    from torch import Tensor


@dataclass(frozen=True)
class RanksReport:
    """Counters from the start of the engine, as rank 0 has them."""

    size: int = 1
    calls: int = 0  # in which ranks met: sums, logits, sampled tokens
    bytes: int = 0  # that rank 0 gave to them
    seconds: float = 0.0  # in which rank 0 waited for them, for slower ranks too
    expert_rows: tuple[int, ...] = ()  # by rank: rows that its experts were asked for; (): experts are not dealt out


ONE = RanksReport()


def told_rows(expert_rows: Tensor) -> tuple[int, ...]:
    """Return the rows of each rank's experts; () where none was counted."""
    rows = tuple(expert_rows.tolist())
    return rows if any(rows) else ()
