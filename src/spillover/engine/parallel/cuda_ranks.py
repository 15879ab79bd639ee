"""Ranks on CUDA devices of one machine, or on one device that they share: each maps the buffers of all others.

Ranks exchange the handles of their buffers through a file store of torch.distributed, which has no other use here.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from spillover.engine.parallel.gloo_ranks import MEETING_SECONDS
from spillover.engine.parallel.report import RanksReport, expert_rows
from spillover.kernels.cuda.peers.exchange import Exchange, buffer_bytes
from spillover.memory.transfer.cuda_driver import cuda_driver
from spillover.plan.workspace import RANK_CALL_BYTES


class CudaRanks:
    def __init__(self, rank: int, size: int, folder: Path, pool_bytes: int = 0) -> None:
        """Meet the other ranks, which use the same folder. The current device is this rank's. `pool_bytes`: size of the
        KV pool that every other rank allocates here and rank 0 maps; 0: none."""
        self.rank = rank
        self.size = size
        self.waiting_since: float | None = None  # always None: hosts do not wait in calls, only devices do
        device = torch.device("cuda", torch.cuda.current_device())
        self.expert_rows = torch.zeros(size, dtype=torch.int64, device=device)
        driver = cuda_driver()
        torch.cuda.current_stream().synchronize()  # creates the device's context
        own = driver.allocate(buffer_bytes(size, RANK_CALL_BYTES))
        store = FileStore(str(folder / "ranks"), size)
        store.set_timeout(timedelta(seconds=MEETING_SECONDS))
        store.set(f"buffer-{rank}", driver.share(own).hex())
        handles = [bytes.fromhex(store.get(f"buffer-{other}").decode()) for other in range(size)]
        buffers = [own if other == rank else driver.open_shared(handle) for other, handle in enumerate(handles)]
        self.pools: list[Tensor] = []  # at rank 0: the pools of all other ranks; at another rank: its own pool
        if pool_bytes and rank:
            address = driver.allocate(pool_bytes)
            store.set(f"pool-{rank}", driver.share(address).hex())
            self.pools = [_tensor(address, pool_bytes)]
        elif pool_bytes:
            for other in range(1, size):
                handle = bytes.fromhex(store.get(f"pool-{other}").decode())
                self.pools.append(_tensor(driver.open_shared(handle), pool_bytes))
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
        """Make steps complete that wait for a lost rank."""
        self._exchange.stop()

    def check(self) -> None:
        """Raise RuntimeError if a call has ended without all ranks."""
        if self._exchange.stopped:
            raise RuntimeError("a rank did not join a call of the others in time")

    def report(self) -> RanksReport:
        rows = expert_rows(self.expert_rows)  # waits for the device
        return RanksReport(self.size, self._exchange.calls, self._exchange.bytes, self._exchange.seconds, rows)


class _Memory:
    """Bytes at an address of the current device, in a form that torch.as_tensor accepts."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def _tensor(address: int, nbytes: int) -> Tensor:
    return torch.as_tensor(_Memory(address, nbytes), device="cuda")
