"""Builds the lower KV tiers: the link to the device, host memory, a shared pool, disks and a remote store."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spillover.engine.backend import Backend
from spillover.engine.batch.offloaded_prefix import spill_codec
from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError
from spillover.kernels.attention import KV_LAYOUT
from spillover.kernels.kv_quant import slot_layout
from spillover.memory.budgets import parse_disk
from spillover.memory.policies.admission import admission_policy
from spillover.memory.shared_pool.tier import SharedPoolTier, pool_threads
from spillover.memory.shared_pool.wire import socket_path
from spillover.memory.spill.store import SpillStore
from spillover.memory.tiers.base import Tier
from spillover.memory.tiers.disk import DiskTier
from spillover.memory.tiers.disks import Disks
from spillover.memory.tiers.seal import read_seal
from spillover.memory.tiers.token_log import TokenLog
from spillover.memory.transfer.link import DeviceLink
from spillover.models.config import ModelConfig
from spillover.models.sharding.shard import Shard
from spillover.plan.measure import measure_link
from spillover.plan.planner import Plan
from spillover.plan.tiers import staging_blocks, with_tier_rates

SWITCH_SECONDS = 0.0002  # Python's thread switch interval, in seconds
DISK_READ = REMOTE_READ = 1e9  # assumed rates in bytes per second, until they are measured


class LoggedDisk(DiskTier):
    """A disk tier that may keep a log of tokens in its folder, written under the lock of the tier."""

    tokens: TokenLog | None = None

    def close(self, deadline: float) -> None:
        """Close the log, then the tier: nothing may be written to the folder once it is unlocked."""
        if self.tokens is not None:
            self.tokens.close(deadline - time.monotonic())
        super().close(deadline)


def token_log(config: EngineConfig, identity: bytes) -> TokenLog | None:
    """Return the log that keeps tokens for drafting after a restart, in the first disk's folder; None if not used."""
    if not config.disk or config.speculation is None or config.speculation.method != "suffix":
        return None
    budget = parse_disk(config.disk[0])
    made = TokenLog(budget.path, budget.capacity_bytes, identity, read_seal(config.kv_store_key_file))
    return made if made.most_bytes else None


def make_store(config: EngineConfig, plan: Plan, model: ModelConfig, pool: Tensor, identity: bytes,
               backend: Backend, tokens: TokenLog | None = None, others: Sequence[Tensor] = ()) -> SpillStore:
    """Make the store of the plan's lower tiers. Disks and links are timed, which takes a moment. `tokens`: a log to
    keep in the first disk's folder. `others`: the pools of the other ranks, where `pool` is that of rank 0."""
    # Copies start and complete in Python on other threads; the engine thread must not wait 5 ms when one of them runs.
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
    link = make_link(config, plan, model, pool, backend, others)
    wake = threading.Event()
    timed = with_tier_rates(plan.tiers, plan.device, link.slot_bytes)
    reads = {tier.name: tier.read for tier in reversed(timed) if tier.read is not None}
    writes = {tier.name: tier.write for tier in reversed(timed) if tier.write is not None}
    links = {name: (writes.get(name), reads.get(name)) for name in reads}
    if "pool" in reads and "host" not in reads:  # else KV in the pool would be recomputed for lack of a rate
        reads["host"] = measure_link(plan.device, link.slot_bytes).to_device
    tiers = _make_tiers(config, plan, link.slot_bytes, identity, wake.set, tokens, backend)
    store = SpillStore(
        link,
        tiers,
        host_blocks=plan.host_blocks,
        staging_blocks=staging_blocks(link.slot_bytes, config.spill),
        eager=config.spill == "eager",
        admission=admission_policy(config.spill_admission),
        rates={"disk": DISK_READ, "remote": REMOTE_READ, **reads},
        link_rates=links,
        wake=wake,
    )
    backend.slots = store.slots
    return store


def make_link(config: EngineConfig, plan: Plan, model: ModelConfig, pool: Tensor, backend: Backend,
              others: Sequence[Tensor] = ()) -> DeviceLink:
    """Make the link between the device's KV blocks and host memory; `others` as in `make_store`."""
    codec = spill_codec(config, model, pool, plan.block_size)
    if not others:
        return backend.link(pool, codec)
    flat = pool.view(-1).view(torch.uint8)
    held = [(each, range(*Shard(rank, 1 + len(others)).kv_heads(model.num_kv_heads)))
            for rank, each in enumerate((flat, *others))]
    return backend.ranks_link(pool, held, model.num_kv_heads, codec)


def _make_tiers(config: EngineConfig, plan: Plan, payload: int, identity: bytes,
                wake: Callable[[], None], tokens: TokenLog | None, backend: Backend) -> list[Tier]:
    description = {"model": plan.model, "dtype": plan.dtype, "kv_cache_dtype": config.kv_cache_dtype,
                   "spill_dtype": config.spill_dtype, "block_size": str(plan.block_size),
                   "layout": f"{KV_LAYOUT};{slot_layout(config.spill_dtype)}"}
    seal = read_seal(config.kv_store_key_file)
    tiers: list[Tier] = []
    disks: list[DiskTier] = []
    if config.host_pool is not None:
        tiers.append(SharedPoolTier(socket_path(config.host_pool), payload, identity, description, wake,
                                    threads=pool_threads(), host=backend.transfers.pool))
    try:
        for text in config.disk:
            budget, kept = parse_disk(text), tokens if not disks else None
            room = budget.capacity_bytes - (kept.most_bytes if kept is not None else 0)
            disk = LoggedDisk(budget.path, room, payload, identity, description, wake, seal=seal)
            disk.tokens = kept
            disks.append(disk)
        if disks:
            tiers.append(disks[0] if len(disks) == 1 else Disks(disks))
        if config.remote is not None:
            from spillover.memory.tiers.remote import RemoteTier  # its client library is imported only if used

            tiers.append(RemoteTier(config.remote, payload, identity, wake, seal=seal))
    except SpilloverError:
        for opened in (*tiers, *disks):
            opened.close(0.0)
        raise
    return tiers
