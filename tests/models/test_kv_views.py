"""The KV pool gives its memory back while the engine sleeps, and is the same afterwards."""

import torch

from spillover.models.groups import LayerGroup
from spillover.models.layers import KVViews


def test_used_blocks_survive_a_sleep() -> None:
    pool = torch.randn(200, 3, 2, 2, 16)
    before = pool.clone()
    views = KVViews(pool, [LayerGroup((0, 1, 2), None)])
    layer, _ = views.layer(1)
    used = [1, 5, *range(70, 190)]
    views.sleep(used)
    assert pool.untyped_storage().nbytes() == 0
    views.wake_up()
    assert torch.equal(pool[used], before[used])
    assert torch.equal(layer[used], before[used, 1])
    views.wake_up()  # awake already
    assert torch.equal(pool[used], before[used])
