"""Simulated engines that publish KV events: the tiers that store their blocks, and the true contents of each tier."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spillover.memory.kv.event_wire import block_hash
from spillover.memory.tiers.base import Tier
from spillover.memory.tiers.disk import DiskTier
from spillover.memory.tiers.disks import Disks
from support.events.kv_mirror import Holdings
from support.simulated_tiers import DictTier
from support.tiered_world import World, prompt


def on_disk(path: Path, blocks: int = 24) -> Callable[[Callable[[], None]], Tier]:
    def make(wake: Callable[[], None]) -> Tier:
        payload = World().link.slot_bytes
        return DiskTier(path, blocks * 8192 + (64 << 10), payload, b"identity", {}, wake, segment_bytes=16 << 10)

    return make


def on_two_disks(path: Path) -> Callable[[Callable[[], None]], Tier]:
    def make(wake: Callable[[], None]) -> Tier:
        parts = [on_disk(path / name, 12)(wake) for name in ("one", "two")]
        return Disks([part for part in parts if isinstance(part, DiskTier)])

    return make


def truth(world: World) -> Holdings:
    """Return the blocks that the engine's own tables contain, as (medium, layer group, hash)."""
    tree, found = world.kv.tree, set[tuple[str, int, int]]()
    for block in range(1, world.kv.pool.most + 1):
        if world.kv.pool.cached(block):
            node, group = tree.home(block)
            found.add(("GPU", group, block_hash(node.digest)))
    if world.store.keeps:
        found |= {("CPU", entry.key[-1], block_hash(entry.key[:-1])) for entry in world.store._host
                  if entry.ready and not entry.private and not entry.forgotten}
    for tier in world.tiers:
        for disk in tier.disks if isinstance(tier, Disks) else [tier] if isinstance(tier, DiskTier) else ():
            keys = [record.key for slot in disk._table.live() if (record := disk._table[slot].record) is not None]
            found |= {("STORAGE", key[-1], block_hash(key[:-1])) for key in keys if tier.has(key)}
    return found


PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"host": 12},
    "disk": {"disk": on_disk},
    "host and disk": {"host": 10, "disk": on_disk},
    "host and two disks": {"host": 10, "disk": on_two_disks, "eager": True},
    "host, disk and remote": {"host": 10, "disk": on_disk,
                              "remote": lambda wake: DictTier(wake, "remote", lookup_delay=0.001)},
}


def options_of(place: str, folder: Path) -> dict[str, Any]:
    options = dict(PLACES[place])
    tiers = [options.pop("disk")(folder)] if "disk" in options else []
    if "remote" in options:
        tiers.append(options.pop("remote"))
    return {**options, "tiers": tiers}


def requests(rng: random.Random, count: int) -> Iterator[tuple[list[int], str | None]]:
    """Yield prompts that share prefixes, some with a cache salt."""
    beginnings = [prompt(seed, 16) for seed in range(4)]
    for _ in range(count):
        yield rng.choice(beginnings)[: rng.randrange(4, 17)] + prompt(rng.randrange(6), rng.randrange(1, 40)), (
            rng.choice([None, None, "tenant-a", "tenant-b"]))
