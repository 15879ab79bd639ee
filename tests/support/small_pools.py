"""KV pools of models of a few kilobytes: as many blocks as tests can use, not the million that a default budget holds.

An engine on a CPU that is given no budget takes 1 GiB for KV, and writes it once. Blocks of a model for people are
large enough that this is fewer than the bound here: their plans are as always.
"""

from __future__ import annotations

from spillover.plan import fit, planner
from spillover.plan.hardware import Machine
from spillover.plan.request import PlanRequest

BLOCKS, BYTES = 1 << 14, 128 << 20  # at least; a draft model lies in the bytes too


def install() -> None:
    """Bound the default of a CPU, in this process."""
    plain, most = planner.fit, fit.CPU_KV_BYTES

    def bounded(request: PlanRequest, sizes: fit.Sizes, machine: Machine, available: int) -> tuple[int, int]:
        fit.CPU_KV_BYTES = min(most, max(BYTES, BLOCKS * sizes.block_bytes))
        try:
            return plain(request, sizes, machine, available)
        finally:
            fit.CPU_KV_BYTES = most

    planner.fit = bounded  # type: ignore[assignment]
