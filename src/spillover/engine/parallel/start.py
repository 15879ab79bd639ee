"""Starts the ranks of a plan: rank 0 is this process, all others are child processes."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from spillover.engine.config import EngineConfig
from spillover.engine.loop import ModelRunner
from spillover.engine.parallel.gloo_ranks import GlooRanks
from spillover.engine.parallel.messages import Launch
from spillover.engine.parallel.parallel_runner import ParallelRunner
from spillover.engine.parallel.rank_plan import without_tiers
from spillover.engine.parallel.rank_processes import RankProcesses
from spillover.errors import SpilloverError
from spillover.kernels.huge_pages import make_file, map_file
from spillover.models.sharding.ranks import Ranks
from spillover.plan.hardware import probe
from spillover.plan.planner import Plan

if TYPE_CHECKING:
    from spillover.engine.parallel.cuda_ranks import CudaRanks


class MakeRunner(Protocol):
    def __call__(self, *, ranks: Ranks) -> ModelRunner: ...


def meet(device: str, rank: int, size: int, folder: Path, pool_bytes: int = 0) -> GlooRanks | CudaRanks:
    """Meet the other ranks, which use the same folder; on CUDA this first selects the rank's device. `pool_bytes`: size
    of each KV pool on a CUDA device that rank 0 maps."""
    if device != "cuda":
        return GlooRanks(rank, size, folder)
    from spillover.engine.parallel.cuda_ranks import CudaRanks

    torch.cuda.set_device(rank % torch.cuda.device_count())
    return CudaRanks(rank, size, folder, pool_bytes)


def start_ranks(config: EngineConfig, plan: Plan, make: MakeRunner) -> ParallelRunner:
    """Start the other ranks, make rank 0's runner while they load, and return a runner that uses all ranks."""
    size, threads = config.tensor_parallel_size, torch.get_num_threads()
    share = max(1, min(threads, probe().cores // size))
    cuda, maps = plan.device == "cuda", bool(plan.tiers)  # tiers hold whole blocks, which rank 0 assembles
    pools = [_shared_pool(plan.kv_bytes) for _ in range(1, size)] if maps and not cuda else []
    others: RankProcesses | None = None
    inner: ModelRunner | None = None
    try:
        with tempfile.TemporaryDirectory(prefix="spillover-ranks-") as folder:
            others = RankProcesses([
                Launch(config, without_tiers(plan), rank, os.getpid(), folder, share,
                       pools[rank - 1][0] if pools else None, maps and cuda)
                for rank in range(1, size)])
            others.wait_started()
            try:
                ranks = meet(plan.device, 0, size, Path(folder), plan.kv_bytes if maps else 0)
            except RuntimeError as error:  # raised by gloo or CUDA
                raise SpilloverError(f"the ranks could not connect to each other ({others.lost()})") from error
            others.on_lost = ranks.stop
            others.wait_met()
        torch.set_num_threads(share)
        inner = make(ranks=ranks)
        others.wait_loaded()
    except BaseException:
        torch.set_num_threads(threads)
        if others is not None:
            others.close()
        if inner is not None:
            inner.close()
        raise
    finally:
        for descriptor, _ in pools:
            os.close(descriptor)
    mapped = [torch.frombuffer(memory, dtype=torch.uint8) for _, memory in pools] or list(ranks.pools)
    runner = ParallelRunner(inner, others, mapped, others.lost_descriptor, ranks.report,
                            lambda: torch.set_num_threads(threads), ranks.check)
    if cuda:  # a rank whose device computes uses no CPU time
        others.watch(lambda: runner.waiting_since, only_stopped=True)
    else:
        others.watch(lambda: ranks.waiting_since)
    weakref.finalize(runner, others.close)
    return runner


def _shared_pool(nbytes: int) -> tuple[int, mmap.mmap]:
    """Make anonymous shared memory, freed when its last mapping is gone; return (descriptor, mapping)."""
    descriptor = make_file("spillover-kv", nbytes)
    return descriptor, map_file(descriptor, nbytes)
