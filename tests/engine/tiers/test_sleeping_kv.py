"""The KV pool frees its memory while the engine sleeps, and has the same content afterwards."""

from typing import Any, cast

import torch

from spillover.engine.cuda.sleeping_kv import SleepingKV
from spillover.models.groups import LayerGroup
from spillover.models.layers import KVViews


class Host:
    """A host that only counts the copied blocks."""

    def __init__(self) -> None:
        self.blocks = 0

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self.blocks += len(tensor)
        return tensor.clone()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        self.blocks -= len(tensor)
        return tensor


def test_used_blocks_survive_a_sleep() -> None:
    pool, host = torch.randn(200, 3, 2, 2, 16), Host()
    before = pool.clone()
    layer, _ = KVViews(pool, [LayerGroup((0, 1, 2), None)]).layer(1)
    used = [1, 5, *range(70, 190)]
    asleep = SleepingKV(pool, used, cast(Any, host))
    assert (pool.untyped_storage().nbytes(), host.blocks) == (0, len(used))
    asleep.wake_up()
    assert torch.equal(pool[used], before[used])
    assert torch.equal(layer[used], before[used, 1])
    assert host.blocks == 0
