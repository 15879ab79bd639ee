"""The memory of experts on a CUDA device, independent of how they are fetched."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from spillover.kernels.moe.experts import ExpertWeights, expert_stacks
from spillover.kernels.moe.paged_moe import Passes, begin_passes
from spillover.kernels.moe.records import Record


class ExpertArena:
    """Device slots of one expert each; the stream buffers come after all other slots."""

    def __init__(self, slots: Tensor, record: Record) -> None:
        """View `slots`, uint8 [n, record], as expert records."""
        self.slots = slots
        self.record_bytes = record.nbytes
        self.first, self.second = expert_stacks(cast(ExpertWeights, record.stacks(slots)))
        self._storage_bytes = slots.untyped_storage().nbytes()

    @property
    def nbytes(self) -> int:
        return self.slots.numel()

    def passes(self, x: Tensor, scores: Tensor, k: int, renormalize: bool, limit: float | None) -> Passes:
        """Begin a mixture that is computed over these slots in several passes."""
        return begin_passes(x, scores, k, renormalize, self.first.gemm, self.second.width, limit)

    def sleep(self) -> None:
        self.slots.untyped_storage().resize_(0)

    def wake_up(self) -> None:
        self.slots.untyped_storage().resize_(self._storage_bytes)
