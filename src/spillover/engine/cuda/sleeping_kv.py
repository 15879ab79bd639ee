"""A KV pool whose device memory is freed while the engine sleeps: blocks in use are kept on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spillover.memory.transfer.cuda_transfers import CudaTransfers

BLOCKS_AT_ONCE = 64


class SleepingKV:
    def __init__(self, pool: Tensor, blocks: Sequence[int], transfers: CudaTransfers) -> None:
        """Copy these blocks to the host and free the pool's memory; views of it are usable again after `wake_up`."""
        self._pool = pool
        self._transfers = transfers
        self._nbytes = pool.untyped_storage().nbytes()
        indices = [torch.tensor(blocks[start : start + BLOCKS_AT_ONCE], dtype=torch.long, device=pool.device)
                   for start in range(0, len(blocks), BLOCKS_AT_ONCE)]
        self._kept = [(index, transfers.to_host(pool[index])) for index in indices]
        pool.untyped_storage().resize_(0)

    def wake_up(self) -> None:
        """Allocate the memory again and copy the blocks back."""
        self._pool.untyped_storage().resize_(self._nbytes)
        self._pool.zero_()
        for index, kept in self._kept:
            self._pool[index] = self._transfers.to_device(kept)
