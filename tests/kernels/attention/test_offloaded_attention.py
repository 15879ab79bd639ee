"""A prefix that is not in the pool: attention processes it in segments, with the bits it would have in the pool."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spillover.kernels import attention as attention_module
from spillover.kernels import native
from spillover.kernels.attention import attention, offloaded_attention_reference, store_kv
from spillover.kernels.batch import AttentionBatch
from spillover.kernels.extents import split_blocks
from support.kernels.sequences import Sequences, sequences

needs_native = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")


class Stage:
    """Blocks removed from the pool, returned a few at a time in one buffer that is overwritten in between."""

    def __init__(self, blocks: Tensor, layer: int, sizes: list[int], length: int, resident: Tensor) -> None:
        self.num_blocks = blocks.shape[0]
        self.length = length
        self.resident = resident
        self.addresses: Tensor | None = None
        self._blocks = blocks  # [n, 2, Hk, size]
        self._layer = layer
        self._sizes = sizes

    def segments(self, layer: int) -> Iterator[Tensor]:
        assert layer == self._layer
        first = 0
        for size in self._sizes:
            stage = self._blocks[first : first + size].clone()
            yield stage
            stage.fill_(255 if stage.dtype is torch.uint8 else float("nan"))
            first += size
        assert first == self.num_blocks


def make_offloaded(s: Sequences, offloaded: int, seed: int) -> Stage:
    """Remove the first blocks of request 0 from the pool, in segments of random numbers of splits."""
    rng, split = torch.Generator().manual_seed(seed), split_blocks(s.block_size)
    sizes, left = [], offloaded
    while left:
        size = min(left, split * int(torch.randint(1, 4, (), generator=rng)))
        sizes.append(size)
        left -= size
    ids = s.tables[0, :offloaded].long()
    stage = Stage(s.pool[ids, 1].clone(), 5, sizes, len(s.q[0]), s.tables[0, offloaded:].long())
    s.pool[ids] = 255 if s.pool.dtype is torch.uint8 else float("nan")
    s.tables[0, :offloaded] = 0
    return stage


def run(s: Sequences, first: int, last: int, offloaded: Stage | None, sinks: Tensor | None) -> Tensor:
    batch, q, k, v = s.batch([(0, first, last)])
    batch = AttentionBatch(**{**batch.__dict__, "offloaded": offloaded})
    store_kv(k, v, s.pool[:, 1], batch)
    return attention(q, s.pool[:, 1], batch, 1 / math.sqrt(q.shape[2]), None, sinks, layer=5)


@needs_native
@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(2, 1800),
    chunk=st.sampled_from([1, 2, 7, 40, 300]),
    share=st.floats(0, 1),
    shape=st.tuples(st.sampled_from([(1, 1), (6, 2), (9, 3), (14, 1), (32, 1)]), st.sampled_from([8, 24, 64])),
    block_size=st.sampled_from([8, 16, 24, 48, 128, 512]),
    kind=st.sampled_from(["auto", "auto", "fp8", "int8"]),
    with_sinks=st.booleans(),
    threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 999),
)
def test_cold_blocks_give_the_bits_of_resident_ones(
    length: int, chunk: int, share: float, shape: tuple[tuple[int, int], int], block_size: int, kind: str,
    with_sinks: bool, threads: int, seed: int,
) -> None:
    (heads, kv_heads), dim = shape
    first = max(0, length - chunk)
    offloaded = round(share * (first // block_size))
    s = sequences([length], heads, kv_heads, dim, block_size, seed, kind)
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(seed)) if with_sinks else None
    if first:
        s.run([(0, 0, first)])
    wanted = run(s, first, length, None, sinks)
    before = torch.get_num_threads()
    host = s.pool[s.tables[0, :offloaded].long()].repeat(1, 3, *[1] * 3)  # six layers, of which the last is used
    stage = make_offloaded(s, offloaded, seed) if offloaded else None
    try:
        torch.set_num_threads(threads)
        assert torch.equal(run(s, first, length, stage, sinks), wanted)
        if stage is not None:
            stage.addresses = torch.tensor([block.data_ptr() for block in host])
            assert torch.equal(run(s, first, length, stage, sinks), wanted)
    finally:
        torch.set_num_threads(before)


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(40, 700),
    chunk=st.sampled_from([1, 7, 40]),
    kind=st.sampled_from(["auto", "fp8", "int8"]),
    with_sinks=st.booleans(),
    scores=st.sampled_from([1 << 10, 1 << 25]),
    seed=st.integers(0, 99),
)
def test_the_reference_gives_the_same_but_for_rounding(
    length: int, chunk: int, kind: str, with_sinks: bool, scores: int, seed: int
) -> None:
    first = length - chunk
    s = sequences([length], kv_dtype=kind, seed=seed)
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(seed)) if with_sinks else None
    if first:
        s.run([(0, 0, first)])
    wanted = run(s, first, length, None, sinks)
    stage = make_offloaded(s, first // s.block_size, seed)
    batch, q, _, _ = s.batch([(0, first, length)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_module, "MOST_SCORES", scores)
        out = offloaded_attention_reference(q, s.pool[:, 1], batch, stage, 5, 1 / math.sqrt(32), sinks)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


@needs_native
def test_a_segment_that_cuts_a_split_is_refused() -> None:
    s = sequences([700])
    s.run([(0, 0, 699)])
    ids, resident = s.tables[0, :40].long(), s.tables[0, 40:].long()
    with pytest.raises(ValueError, match="whole splits"):
        run(s, 699, 700, Stage(s.pool[ids, 1], 5, [15, 25], 700, resident), None)
    with pytest.raises(ValueError, match="laid out as the pool's"):
        run(s, 699, 700, Stage(s.pool[ids, 1].transpose(1, 2), 5, [40], 700, resident), None)


def test_a_cold_request_is_alone() -> None:
    s = sequences([20, 20])
    batch, *_ = s.batch([(0, 0, 20), (1, 0, 20)])
    with pytest.raises(ValueError, match="alone"):
        AttentionBatch(**{**batch.__dict__, "offloaded": Stage(s.pool[1:2, 1], 5, [1], 20, s.tables[0, 1:])})
