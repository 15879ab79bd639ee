"""KV pools for models of a few kilobytes: enough blocks for the tests, not the million that a default budget holds.

On a CPU without a budget an engine allocates 1 GiB for KV and writes all of it once. The blocks of full-size models are
so large that fewer than the limit here fit: their plans are unchanged.
"""

from __future__ import annotations

from spillover.plan import fit, planner
from spillover.plan.hardware import Machine
from spillover.plan.request import PlanRequest

BLOCKS, BYTES = 1 << 14, 128 << 20  # minimum pool: blocks, and bytes (which include a draft model)


def install() -> None:
    """Limit the default KV budget of a CPU, in this process."""
    plain, most = planner.fit, fit.CPU_KV_BYTES

    def bounded(request: PlanRequest, sizes: fit.Sizes, machine: Machine, available: int) -> tuple[int, int]:
        fit.CPU_KV_BYTES = min(most, max(BYTES, BLOCKS * sizes.block_bytes))
        try:
            return plain(request, sizes, machine, available)
        finally:
            fit.CPU_KV_BYTES = most

    planner.fit = bounded  # type: ignore[assignment]
