"""A mixture whose experts are paged, or processed in passes, equals the one with all experts resident, to the bit."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from spillover.kernels import extents
from spillover.kernels.formats.grouped_gemm import Tile
from spillover.kernels.moe import host_expert_queue as fields
from spillover.kernels.moe.experts import Experts
from spillover.kernels.moe.host_expert_queue import HostExpertQueue
from spillover.kernels.moe.moe import LocalExperts
from spillover.kernels.moe.page_table import PageTable
from spillover.kernels.moe.paged_moe import MultiPassMixtureReference, experts_reference, paged_mixture_reference
from support.kernels.mixtures import DEVICE, assert_near, case

pytest.importorskip("triton")
from spillover.kernels.triton.moe import moe
from spillover.kernels.triton.moe import paged_moe as paged

EXPERTS, K = 9, 2
SHAPES = [  # (format, hidden, inner, clamped, dtype)
    ("dense", 64, 48, False, torch.float32),
    ("fp8", 144, 64, False, torch.bfloat16),
    ("mxfp4", 96, 64, True, torch.bfloat16),
    ("int4_64", 128, 128, False, torch.bfloat16),
]


def laid_out(first: Experts, second: Experts) -> tuple[Tensor, list[tuple[int, Tensor]], int]:
    """Pack each expert into a record; return the records uint8 [E, bytes], the tensors' offsets, and the bytes."""
    at, offsets = 0, []
    for tensor in (first.values, first.scales, first.bias, second.values, second.scales, second.bias):
        if tensor is not None:
            offsets.append((at, tensor))
            at += -(-tensor[0].nbytes // 256) * 256
    records = torch.zeros(EXPERTS, at, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
    for start, tensor in offsets:
        records[:, start : start + tensor[0].nbytes] = tensor.contiguous().view(EXPERTS, -1).view(torch.uint8).cpu()
    return records, offsets, at


def stacks(arena: Tensor, offsets: list[tuple[int, Tensor]], like: tuple[Experts, Experts]) -> list[Experts]:
    """Return views of an arena of slots uint8 [S, bytes]."""
    views = iter([
        arena[:, at : at + tensor[0].nbytes].view(tensor.dtype).unflatten(1, tensor.shape[1:]) for at, tensor in offsets
    ])
    return [Experts(each.weight.map(lambda _: next(views)), next(views) if each.bias is not None else None)
            for each in like]


class Paged:
    """A layer's experts with their home in host memory, and an arena of few slots for it and an earlier layer."""

    def __init__(self, shape: tuple[Any, ...], tokens: int, quota: int = 6, stream_buffers: int = 0) -> None:
        form, hidden, inner, clamped, dtype = shape
        self.limit = 1.5 if clamped else None
        self.x, self.scores, *self.whole = case(form, tokens, hidden, inner, EXPERTS, dtype, clamped)
        self.first, self.second = self.whole
        self.records, self.offsets, nbytes = laid_out(self.first, self.second)
        self.arena = torch.full((2 + quota + stream_buffers, nbytes), 0xAB, dtype=torch.uint8, device=DEVICE)
        self.slots = stacks(self.arena, self.offsets, (self.first, self.second))
        self.table = PageTable.make([2, quota], EXPERTS, 40, 4, torch.device(DEVICE), stream_buffers)
        object.__setattr__(self.table, "quota", quota)  # no step uses the first layer
        self.tiles = tuple(Tile(16, rows, 128, 4, 2) for rows in (64, 128))
        self.few = tuple(Tile(1, rows, 256 if form == "mxfp4" else 128, 4, 2) for rows in (64, 128))

    def mixed(self, x: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        result: Tensor = paged.paged_mixture(
            x, scores, self.table, 1, self.records, self.arena, *self.slots, K, True, self.limit, **kwargs
        )
        return result

    def draw(self, rng: random.Random, tokens: int) -> tuple[Tensor, Tensor]:
        """Return rows and scores unlike those of earlier steps, so that other experts are needed."""
        order = torch.tensor([rng.sample(range(EXPERTS), EXPERTS) for _ in range(tokens)], device=DEVICE)
        return self.x[:tokens], self.scores[:tokens].gather(1, order)


def test_shapes_of_records_are_those_of_slots() -> None:
    there = Paged(SHAPES[2], 1)
    there.arena[3] = there.records[5].to(DEVICE)
    for slot, whole in zip(there.slots, there.whole, strict=True):
        assert torch.equal(slot.values[3], whole.values[5])
        assert slot.values.stride(0) * slot.values.itemsize == there.arena.shape[1]
        assert slot.bias is not None
        assert whole.bias is not None
        assert torch.equal(slot.bias[3], whole.bias[5])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[0])
@pytest.mark.parametrize("few", [True, False])
def test_paged_is_resident_to_the_bit(shape: tuple[Any, ...], few: bool) -> None:
    there = Paged(shape, 3)
    kwargs = {"few_tokens": 8 if few else 0, "tiles": there.few if few else there.tiles}
    rng = random.Random(1)
    for tokens in (3, 1, 3, 3):
        there.table.advance()
        x, scores = there.draw(rng, tokens)
        found = there.mixed(x, scores, **kwargs)
        expected = moe.mixture(x, scores, *there.whole, K, True, there.limit, **kwargs)
        assert torch.equal(found, expected)
        there.table.check()
    hits, gathered, hosted = there.table.totals[1].tolist()
    assert hits > 0
    assert gathered > 6  # more than there are slots, so some were replaced
    assert hosted == 0


@pytest.mark.parametrize(("shape", "tokens"), [(SHAPES[0], 5), (SHAPES[2], 5), (SHAPES[0], 9)])
def test_more_experts_than_slots_are_resident_to_the_bit(shape: tuple[Any, ...], tokens: int) -> None:
    """Experts without a slot pass through stream buffers, in several passes if necessary, and the bits are the same."""
    there = Paged(shape, tokens, quota=4, stream_buffers=3)
    kwargs = {"tiles": there.few if tokens <= moe.FEW_TOKENS else there.tiles}
    rng = random.Random(4)
    for _ in range(2):
        there.table.advance()
        x, scores = there.draw(rng, tokens)
        found = there.mixed(x, scores, **kwargs)
        assert torch.equal(found, moe.mixture(x, scores, *there.whole, K, True, there.limit, **kwargs))
        there.table.check()
    hits, gathered, _ = there.table.totals[1].tolist()
    assert hits > 0
    assert 4 < gathered <= 2 * EXPERTS - hits  # each expert once per step, for any number of tokens


def test_the_plain_paged_mixture_is_near() -> None:
    there, plain = Paged(SHAPES[0], 3), Paged(SHAPES[0], 3)
    rng = random.Random(2)
    for _ in range(3):
        x, scores = there.draw(rng, 3)
        found = there.mixed(x, scores, tiles=there.few)
        expected = paged_mixture_reference(
            x, scores, plain.table, 1, plain.records, plain.arena, *plain.slots, K, True, plain.limit
        )
        assert_near(found, expected, 1e-5)
        assert torch.equal(there.table.slot_of, plain.table.slot_of)
        assert torch.equal(there.arena, plain.arena)


@contextmanager
def host(there: Paged, queue: HostExpertQueue) -> Iterator[list[int]]:
    """Answer the queue in a thread; yield the list of layers that it was asked for."""
    layers: list[int] = []
    stop = threading.Event()
    # Copied before the thread starts: a copy from the device would wait for the kernel that waits for this thread.
    cpu = [Experts(each.weight.map(lambda tensor: tensor.cpu())) for each in there.whole]

    def work() -> None:
        turn = 0
        while not stop.is_set():
            if int(queue.header[fields.POSTED]) == turn:
                stop.wait(1e-4)
                continue
            turn = int(queue.header[fields.POSTED])
            count, tokens = int(queue.header[fields.COUNT]), int(queue.header[fields.TOKENS])
            layers.append(int(queue.header[fields.LAYER]))
            pairs = queue.pairs[:count]
            rows = torch.zeros(count, queue.x.shape[1])
            everyone = torch.arange(EXPERTS, dtype=torch.int32)
            experts_reference(queue.x[:tokens][pairs[:, 0].long()], pairs[:, 1:2], everyone, *cpu, there.limit, rows)
            queue.out[:count] = rows
            queue.header[fields.DONE] = turn

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield layers
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("few", [True, False])
def test_the_host_computes_its_share_of_the_misses(few: bool) -> None:
    there = Paged(SHAPES[0], 3)
    queue = HostExpertQueue.make(3, 6, 64, torch.device(DEVICE))
    split = torch.tensor([0, 0, 1, 1, 2, 2, 3], dtype=torch.int32, device=DEVICE)
    kwargs = {"few_tokens": 8 if few else 0, "tiles": there.few if few else there.tiles}
    rng = random.Random(3)
    with host(there, queue) as layers:
        for _ in range(5):
            there.table.advance()
            x, scores = there.draw(rng, 3)
            found = there.mixed(x, scores, split=split, queue=queue, **kwargs)
            assert_near(found, moe.mixture(x, scores, *there.whole, K, True, there.limit, **kwargs), 1e-5)
            there.table.check()
    _, gathered, hosted = there.table.totals[1].tolist()
    assert gathered > 0
    assert hosted > 0
    assert set(layers) == {1}
    assert not queue.failed


@pytest.mark.parametrize("tokens", [3, 20])
def test_the_host_computes_some_experts_while_others_pass(tokens: int) -> None:
    there = Paged(SHAPES[0], tokens)
    queue = HostExpertQueue.make(tokens, tokens * K, 64, torch.device(DEVICE))
    kwargs = {"few_tokens": 8, "tiles": there.few if tokens <= 8 else there.tiles}
    rng = random.Random(tokens)
    with host(there, queue) as layers:
        for _ in range(3):
            x, scores = there.draw(rng, tokens)
            mine = rng.sample(range(EXPERTS), 4)
            hosted = torch.zeros(EXPERTS, dtype=torch.int32, device=DEVICE)
            hosted[mine] = 1
            row = torch.full((EXPERTS,), -1, dtype=torch.int32, device=DEVICE)
            for at, expert in enumerate(sorted(set(range(EXPERTS)) - set(mine))):
                there.arena[at] = there.records[expert].to(DEVICE)
                row[expert] = at
            passes = paged.MultiPassMixture(x, scores, K, True, there.first.gemm, there.second.width, there.limit,
                                            **kwargs)
            passes.delegate(hosted, 1, queue)
            passes.add(*there.slots, row)
            assert_near(passes.end(), moe.mixture(x, scores, *there.whole, K, True, there.limit, **kwargs), 1e-5)
    assert set(layers) == {1}
    assert not queue.failed


def test_each_row_follows_its_own_place_in_recorded_routing() -> None:
    there = Paged(SHAPES[0], 3)
    replay = torch.tensor([[[0, 1], [8, 3]], [[0, 1], [4, 2]], [[0, 1], [5, 3]]], dtype=torch.int32, device=DEVICE)
    at = torch.tensor([7, 2, 0], dtype=torch.int32, device=DEVICE)
    found = there.mixed(there.x, there.scores, replay=replay, replay_at=at, tiles=there.few)
    only = torch.full_like(there.scores, float("-inf"))
    wanted = replay[at.long() % 3, 1].long()
    only.scatter_(1, wanted, there.scores.gather(1, wanted))
    assert_near(found, moe.mixture(there.x, only, *there.whole, K, True, there.limit, tiles=there.few), 1e-5)
    plain = Paged(SHAPES[0], 3)
    assert_near(found, paged_mixture_reference(
        plain.x, plain.scores, plain.table, 1, plain.records, plain.arena, *plain.slots, K, True, plain.limit,
        replay=replay, replay_at=at), 1e-5)


def test_replayed_routing_takes_the_place_of_the_router() -> None:
    there = Paged(SHAPES[0], 3)
    replay = torch.tensor([[[0, 1], [8, 3]], [[0, 1], [4, 2]]], dtype=torch.int32, device=DEVICE)
    x, scores = there.x, there.scores
    for step in range(3):
        there.table.step.fill_(step)
        found = there.mixed(x, scores, replay=replay, tiles=there.few)
        wanted = replay[step % 2, 1].long()
        only = torch.full_like(scores, float("-inf"))
        only[:, wanted] = scores[:, wanted]
        assert_near(found, moe.mixture(x, only, *there.whole, K, True, there.limit, tiles=there.few), 1e-5)
        assert table_log(there, step) == wanted.tolist() * 3


def table_log(there: Paged, step: int) -> list[int]:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    row: list[int] = there.table.log[step % 4, 1, :6].tolist()
    return row


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[0])
@pytest.mark.parametrize(("tokens", "few_tokens"), [(3, 8), (3, 0), (20, 8)])
def test_passes_over_any_partition_are_one_mixture(shape: tuple[Any, ...], tokens: int, few_tokens: int) -> None:
    there = Paged(shape, tokens)
    passed(there, tokens, few_tokens=few_tokens, tiles=there.few if tokens <= few_tokens else there.tiles)


def test_passes_that_widen_are_one_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents, "WIDE_TOKENS", 20)
    monkeypatch.setattr(extents, "WIDE_ROWS", 4)
    passed(Paged(SHAPES[1], 20), 20)


def passed(there: Paged, tokens: int, **kwargs: Any) -> None:
    expected = moe.mixture(there.x, there.scores, *there.whole, K, True, there.limit, **kwargs)
    gemm, inner = there.first.gemm, there.second.width
    passes = paged.MultiPassMixture(there.x, there.scores, K, True, gemm, inner, there.limit, **kwargs)
    plain = MultiPassMixtureReference(there.x, there.scores, K, True, gemm, inner, there.limit)
    order = random.Random(tokens).sample(range(EXPERTS), EXPERTS)
    for group in (order[:4], order[4:5], order[5:]):
        there.arena.fill_(0xAB)
        row = torch.full((EXPERTS,), -1, dtype=torch.int32, device=DEVICE)
        for at, expert in enumerate(group):
            there.arena[2 * at] = there.records[expert].to(DEVICE)
            row[expert] = 2 * at
        passes.add(*there.slots, row)
        plain.add(*there.slots, row)
    found = passes.end()
    assert torch.equal(found, expected)
    assert_near(found, plain.end(), 1e-5 if there.x.dtype is torch.float32 else 3e-2)


@pytest.mark.parametrize("few_tokens", [0, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_with_experts_of_their_own_add_up_to_the_mixture(shape: tuple[Any, ...], few_tokens: int) -> None:
    each = EXPERTS // 3
    of = Paged(shape, tokens=5)
    tiles = of.few if few_tokens else of.tiles
    whole = moe.mixture(of.x, of.scores, of.first, of.second, K, True, of.limit, few_tokens, tiles)
    counted = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    total = torch.zeros_like(whole, dtype=torch.float32)
    for rank in range(3):
        own = LocalExperts(rank * each, (rank + 1) * each, counted if rank == 0 else None)
        held = [Experts(stack.weight.map(lambda tensor, own=own: tensor[own.start : own.stop].contiguous()),
                        None if stack.bias is None else stack.bias[own.start : own.stop].contiguous())
                for stack in (of.first, of.second)]
        total += paged.local_mixture(of.x, of.scores, *held, K, True, of.limit, own, few_tokens, tiles)
    assert_near(total.to(whole.dtype), whole, 1e-5 if whole.dtype is torch.float32 else 1.5e-2)
    assert counted.tolist() == torch.bincount(of.scores.float().topk(K).indices.flatten() // each, minlength=3).tolist()
