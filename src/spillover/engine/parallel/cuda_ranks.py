"""Ranks on CUDA devices of one machine, or on one device that they share: each has the buffers of all others mapped.

Ranks tell each other where their buffers are through a file store of torch.distributed, and nothing else.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from spillover.engine.parallel.gloo_ranks import MEETING_SECONDS
from spillover.engine.parallel.report import RanksReport
from spillover.kernels.cuda.peers.exchange import Exchange, buffer_bytes
from spillover.memory.transfer.cuda_driver import cuda_driver
from spillover.plan.workspace import RANK_CALL_BYTES


class CudaRanks:
    def __init__(self, rank: int, size: int, folder: Path) -> None:
        """Meet the other ranks, which name the same folder. The current device is this rank's."""
        self.rank = rank
        self.size = size
        self.expert_rows = [0] * size
        self.waiting_since: float | None = None  # of hosts, which do not take part in calls
        device = torch.device("cuda", torch.cuda.current_device())
        driver = cuda_driver()
        torch.cuda.current_stream().synchronize()  # makes the device's context
        own = driver.allocate(buffer_bytes(size, RANK_CALL_BYTES))
        store = FileStore(str(folder / "ranks"), size)
        store.set_timeout(timedelta(seconds=MEETING_SECONDS))
        store.set(f"buffer-{rank}", driver.share(own).hex())
        handles = [bytes.fromhex(store.get(f"buffer-{other}").decode()) for other in range(size)]
        buffers = [own if other == rank else driver.open_shared(handle) for other, handle in enumerate(handles)]
        store.set(f"mapped-{rank}", "1")
        store.wait([f"mapped-{other}" for other in range(size)])
        self._exchange = Exchange(rank, buffers, RANK_CALL_BYTES, device)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._exchange.sum(x)

    def gather(self, x: Tensor) -> list[Tensor]:
        return self._exchange.gather(x)

    def broadcast(self, x: Tensor) -> None:
        self._exchange.broadcast(x)

    def stop(self) -> None:
        """Let steps end that wait for a rank which is lost."""
        self._exchange.stop()

    def check(self) -> None:
        """Raise RuntimeError if a call has ended without the others."""
        if self._exchange.stopped:
            raise RuntimeError("a rank has not come to meet the others in time")

    def report(self) -> RanksReport:
        return RanksReport(self.size, self._exchange.calls, self._exchange.bytes, self._exchange.seconds)
