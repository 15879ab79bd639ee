"""Whole blocks assembled from the pools of ranks, and divided again, for any number of ranks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.engine.parallel.rank_codec import RankCodec
from spillover.models.sharding.shard import Shard

ROWS, HEAD_BYTES, BLOCKS = 6, 4, 7


def pools_of(whole: torch.Tensor, size: int) -> list[tuple[torch.Tensor, range]]:
    """Cut blocks [n, rows, heads, bytes] into one pool per rank."""
    heads = [range(*Shard(rank, size).kv_heads(whole.shape[2])) for rank in range(size)]
    return [(whole[:, :, each.start:each.stop].clone(), each) for each in heads]


COUNTS = st.sampled_from([1, 2, 4, 8])


@given(num_heads=COUNTS, stored=COUNTS, read=COUNTS, seed=st.integers(0, 99),
       blocks=st.lists(st.integers(1, BLOCKS - 1), min_size=1, max_size=4, unique=True))
@settings(max_examples=60, deadline=None)
def test_blocks_of_one_number_of_ranks_are_those_of_another(num_heads: int, stored: int, read: int, seed: int,
                                                            blocks: list[int]) -> None:
    """Blocks stored by one number of ranks are read by another, also where several ranks hold the same head."""
    random = torch.Generator().manual_seed(seed)
    shape = BLOCKS, ROWS, num_heads, HEAD_BYTES
    whole = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
    codec = RankCodec(pools_of(whole, stored), num_heads, None)
    chosen = torch.tensor(blocks)
    slots = codec.encode_pool(whole, chosen)
    assert torch.equal(slots, whole[chosen].flatten(1))
    assert slots.shape[1] == codec.slot_bytes
    other = torch.zeros(shape, dtype=torch.uint8)
    pools = pools_of(other, read)
    RankCodec(pools, num_heads, None).decode_pool(slots, other, chosen)
    expected = torch.zeros(shape, dtype=torch.uint8)
    expected[chosen] = whole[chosen]
    for (found, _), (wanted, _) in zip(pools, pools_of(expected, read), strict=True):
        assert torch.equal(found, wanted)
