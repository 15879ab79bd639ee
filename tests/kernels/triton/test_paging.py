"""The device's page table acts like the plain one under any requests, and its slots hold the experts it lists."""

from __future__ import annotations

import math
import random
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from spillover.kernels.fields import ALIGNMENT
from spillover.kernels.moe import host_expert_queue as queue_fields
from spillover.kernels.moe.host_expert_queue import HEADER, HostExpertQueue
from spillover.kernels.moe.page_table import LENT, NONE, PageTable, Resolution
from spillover.kernels.moe.paging import (
    assign_reference,
    collect_reference,
    gather_reference,
    post_reference,
    resolve_reference,
)

pytest.importorskip("triton")
from spillover.kernels.triton.moe import paging as device

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXPERTS, BYTES = 11, 768


def twins(quotas: list[int], pairs: int = 8, log_rows: int = 3, stream_buffers: int = 0) -> tuple[PageTable, PageTable]:
    one, other = (PageTable.make(quotas, EXPERTS, pairs, log_rows, DEVICE, stream_buffers) for _ in range(2))
    return one, other


def assert_same(one: PageTable, other: PageTable) -> None:
    for field in fields(PageTable):
        value = getattr(one, field.name)
        if isinstance(value, Tensor):
            assert torch.equal(value, getattr(other, field.name)), field.name


def assert_same_work(found: Resolution, expected: Resolution) -> None:
    gathers, hosted = expected.counts.tolist()
    assert found.counts.tolist() == [gathers, hosted]
    assert torch.equal(found.gathers[:gathers], expected.gathers[:gathers])
    assert torch.equal(found.hosted[:hosted], expected.hosted[:hosted])
    assert torch.equal(found.place, expected.place)
    assert (found.row is None) == (expected.row is None)
    assert found.row is None or torch.equal(found.row, expected.row)
    assert len(found.later) == len(expected.later)
    for one, other in zip(found.later, expected.later, strict=True):
        assert_same_work(one, other)


def chosen(rng: random.Random, tokens: int, k: int) -> Tensor:
    return torch.tensor([rng.sample(range(EXPERTS), k) for _ in range(tokens)], dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("hosted", [False, True])
def test_a_random_walk_is_the_plain_one(seed: int, hosted: bool) -> None:
    rng = random.Random(seed)
    table, expected = twins([7, 11, 8])
    split = torch.tensor([0, 0, 1, 1, 9, 2], dtype=torch.int32, device=DEVICE) if hosted else None
    records = torch.randint(0, 256, (3, EXPERTS, BYTES), dtype=torch.uint8)
    records = records.pin_memory() if DEVICE.type == "cuda" else records
    slots = torch.zeros(sum([7, 11, 8]), BYTES, dtype=torch.uint8, device=DEVICE)
    for _ in range(12):
        for each in (table, expected):
            each.advance()
        worth = torch.tensor([[rng.choice([-1.5, -0.0, 0.0, 2.0, 1e9, math.inf]) for _ in range(EXPERTS)]] * 3)
        if rng.random() < 0.5:
            table.worth.copy_(worth)
            expected.worth.copy_(worth)
        for layer in range(3):
            ids = chosen(rng, rng.choice([1, 2]), 3)
            found = device.resolve(ids, table, layer, split)
            assert_same_work(found, resolve_reference(ids, expected, layer, split))
            assert_same(table, expected)
            table.check()
            device.gather(found, records[layer], slots, programs=3, nbytes=512)
            there = (table.slot_of[layer] != NONE).nonzero().flatten().cpu()
            assert torch.equal(slots[table.slot_of[layer][there.to(DEVICE)].long()].cpu(), records[layer][there])
    hits, gathered, with_host = table.totals.sum(0).tolist()
    assert hits > 0
    assert gathered > 26  # some experts were replaced
    assert (with_host > 0) == hosted


@pytest.mark.parametrize("stream_buffers", [1, 3])
@pytest.mark.parametrize("hosted", [False, True])
def test_more_experts_than_slots_pass_through_stream_buffers(stream_buffers: int, hosted: bool) -> None:
    """Each expert is fetched once for all its tokens, and belongs to one pass; the layer keeps its own slots."""
    rng, quotas = random.Random(stream_buffers), [4, 3, 6]
    table, expected = twins(quotas, 24, stream_buffers=stream_buffers)
    split = torch.tensor([0, 0, 1, 1, 2, 2], dtype=torch.int32, device=DEVICE) if hosted else None
    records = torch.randint(0, 256, (3, EXPERTS, BYTES), dtype=torch.uint8)
    records = records.pin_memory() if DEVICE.type == "cuda" else records
    slots = torch.zeros(sum(quotas) + stream_buffers, BYTES, dtype=torch.uint8, device=DEVICE)
    most = 0
    for _ in range(10):
        table.advance()
        expected.advance()
        for layer in range(3):
            ids = chosen(rng, rng.choice([1, 3, 8]), 3)
            found = device.resolve(ids, table, layer, split)
            assert_same_work(found, resolve_reference(ids, expected, layer, split))
            assert_same(table, expected)
            table.check()
            computed: list[int] = []
            for each in (found, *found.later):
                device.gather(each, records[layer], slots, programs=3, nbytes=512)
                assert each.row is not None
                there = (each.row != NONE).nonzero().flatten().cpu()
                assert torch.equal(slots[each.row[there.to(DEVICE)].long()].cpu(), records[layer][there])
                computed += there.tolist()
            with_host = set(found.hosted[: int(found.counts[1]), 1].tolist())
            assert len(computed) == len(set(computed))
            assert with_host.isdisjoint(computed)
            assert set(ids.flatten().tolist()) <= with_host | set(computed)
            most = max(most, len(set(ids.flatten().tolist())) - quotas[layer])
    assert most > stream_buffers  # so there was more than one pass
    assert (int(table.totals[:, 2].sum()) > 0) == hosted


def test_the_host_gets_the_experts_with_the_fewest_tokens() -> None:
    table = PageTable.make([9], EXPERTS, 12, 2, DEVICE)
    ids = torch.tensor([[1, 5], [1, 7], [5, 1], [3, 2]], dtype=torch.int32, device=DEVICE)
    found = device.resolve(ids, table, 0, torch.tensor([0, 0, 0, 0, 0, 3], dtype=torch.int32, device=DEVICE))
    assert found.hosted[:3, 1].tolist() == [7, 3, 2]
    assert found.gathers[:2, 0].tolist() == [1, 5]


def fill(table: PageTable, experts: list[int]) -> None:
    for expert in experts:
        device.resolve(torch.tensor([[expert]], dtype=torch.int32, device=DEVICE), table, 0)


def victim(table: PageTable, expert: int) -> int:
    """Return the expert that is evicted when `expert` is fetched."""
    before = set((table.slot_of[0] != NONE).nonzero().flatten().tolist())
    device.resolve(torch.tensor([[expert]], dtype=torch.int32, device=DEVICE), table, 0)
    after = set((table.slot_of[0] != NONE).nonzero().flatten().tolist())
    assert expert in after
    (left,) = before - after
    return left


@pytest.mark.parametrize("seed", range(3))
def test_the_pairs_of_marked_experts_are_the_hosts(seed: int) -> None:
    rng = random.Random(seed)
    ids = chosen(rng, rng.randint(1, 9), rng.randint(1, 4))
    marked = torch.tensor([rng.randrange(2) for _ in range(EXPERTS)], dtype=torch.int32, device=DEVICE)
    found = device.assign(ids, marked)
    assert_same_work(found, assign_reference(ids, marked))
    assert found.counts.tolist() == [0, sum(int(marked[expert]) for expert in ids.flatten().tolist())]


def test_the_lowest_worth_leaves_then_the_longest_unused_then_the_first_slot() -> None:
    table = PageTable.make([5], EXPERTS, 4, 2, DEVICE)
    fill(table, [3, 4, 5, 6, 7])
    table.step.fill_(10)
    fill(table, [3, 5])
    table.step.fill_(20)
    table.worth[0, 4:8] = torch.tensor([2.0, -1.0, -1.0, 2.0], device=DEVICE)
    assert victim(table, 0) == 6  # worth -1, last used in step 0
    assert victim(table, 1) == 5  # worth -1, last used in step 10
    table.step.fill_(30)
    assert victim(table, 2) == 3  # worth 0, as 0 and 1, which were used later
    assert victim(table, 8) == 1  # as old as 0, in a lower slot
    table.step.fill_(31)
    table.worth[0, 0] = 5.0
    assert victim(table, 9) == 4  # 2 and 8 are worth least but were used in the previous step


def test_what_is_worth_most_stays_while_anything_else_can_go() -> None:
    table = PageTable.make([4], EXPERTS, 4, 2, DEVICE)
    fill(table, [0, 1, 2, 3])
    table.worth[0, :2] = math.inf
    table.step.fill_(50)
    for expert in (5, 6, 7):
        assert victim(table, expert) not in (0, 1)
    table.worth[0, 2:] = math.inf
    assert victim(table, 8) == 0


def test_a_lent_slot_is_not_taken() -> None:
    table = PageTable.make([4], EXPERTS, 3, 2, DEVICE)
    table.owner[1] = LENT
    table.step.fill_(5)
    fill(table, [0, 1, 2])
    assert table.owner.tolist() == [0, LENT, 1, 2]
    fill(table, [6])
    assert table.owner[1] == LENT
    assert table.slot_of[0, 6] == 0


def test_the_log_tells_who_was_asked_for() -> None:
    table = PageTable.make([6, 6], EXPERTS, 6, 2, DEVICE)
    for step in range(3):
        table.step.fill_(step)
        device.resolve(torch.tensor([[9, step], [step, 5]], dtype=torch.int32, device=DEVICE), table, 1)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert table.log[0, 1].tolist() == [9, 2, 2, 5, -1, -1]
    assert table.log[1, 1].tolist() == [9, 1, 1, 5, -1, -1]
    assert (table.log[:, 0] == -1).all()


def posted(counts: list[int], pairs: int, place: list[int]) -> Resolution:
    hosted = torch.zeros(pairs, queue_fields.PAIR, dtype=torch.int32, device=DEVICE)
    for pair, row in enumerate(place):
        if row >= 0:
            hosted[row] = torch.tensor([pair // 2, 7 + pair, pair, 0], device=DEVICE)
    return Resolution(
        torch.tensor(counts, dtype=torch.int32, device=DEVICE), torch.zeros(pairs, 2, dtype=torch.int32, device=DEVICE),
        hosted, torch.tensor(place, dtype=torch.int32, device=DEVICE),
    )


@pytest.mark.parametrize("tokens", [2, 3])
def test_mail_is_posted_as_the_plain_one(tokens: int) -> None:
    """Only the rows of tokens in the request are posted, if they are fewer than all."""
    found, expected = (HostExpertQueue.make(3, 6, 40, DEVICE) for _ in range(2))
    x = torch.randn(tokens, 40, dtype=torch.bfloat16, device=DEVICE)
    for layer, resolution in ((3, posted([0, 2], 4, [-1, 0, 1, -1])), (4, posted([0, 0], 4, [-1] * 4))):
        device.post(x, resolution, layer, found)
        post_reference(x, resolution, layer, expected)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(found.memory, expected.memory)
        assert found.header[queue_fields.POSTED] == 1  # the second had nothing to post
        assert found.state.tolist() == [1, 0]


def test_mail_lies_where_its_layout_says() -> None:
    queue = HostExpertQueue.make(3, 6, 40, DEVICE)
    start = queue.memory.data_ptr()
    assert start % ALIGNMENT == 0
    assert queue.header.numel() == HEADER
    layout = queue.layout
    for at, array in ((layout.pairs_at, queue.pairs), (layout.x_at, queue.x), (layout.out_at, queue.out)):
        assert at % ALIGNMENT == 0
        assert array.data_ptr() == start + at
    ends = [at.data_ptr() + at.nbytes for at in (queue.header, queue.pairs, queue.x, queue.out)]
    assert ends[0] <= queue.pairs.data_ptr() < ends[1] <= queue.x.data_ptr() < ends[2] <= queue.out.data_ptr()
    assert ends[3] <= start + layout.nbytes


@pytest.mark.parametrize("few", [0, 16])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("place", [[-1, 1, 0, -1], [-1] * 4, None])
def test_answers_take_their_places_in_the_sum(shared: bool, place: list[int] | None, few: int,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are added in the right places, whether each program waits for them or one does before all others."""
    monkeypatch.setattr(device, "FEW_PROGRAMS", few)
    queue = HostExpertQueue.make(2, 4, 40, DEVICE)
    queue.out.copy_(torch.randn(4, 40))
    queue.state[queue_fields.POST_NUMBER] = 5
    queue.header[queue_fields.DONE] = 5
    rows = torch.randn(4, 40, dtype=torch.float32 if shared else torch.float16, device=DEVICE)
    shares = torch.rand(2, 2, device=DEVICE)
    resolution = None
    if place is not None:
        resolution = posted([0, sum(row >= 0 for row in place)], 4, place)
        rows[resolution.place >= 0] = math.nan  # these rows were never written
    found = device.collect(rows, shares, resolution, queue, torch.float32, shared)
    expected = collect_reference(rows, shares, resolution, queue, torch.float32, shared)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert not queue.failed


@pytest.mark.parametrize("few", [0, 16])
def test_a_host_that_does_not_answer_is_told_of(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "FEW_PROGRAMS", few)
    queue = HostExpertQueue.make(1, 2, 16, DEVICE)
    queue.state[queue_fields.POST_NUMBER] = 2
    queue.header[queue_fields.DONE] = 1
    rows, shares = torch.zeros(2, 16, device=DEVICE), torch.ones(1, 2, device=DEVICE)
    device.collect(rows, shares, posted([0, 0], 2, [-1, -1]), queue, torch.float32, patience=20)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert not queue.failed  # nothing was requested
    device.collect(rows, shares, posted([0, 1], 2, [0, -1]), queue, torch.float32, patience=20)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert queue.failed


def test_the_plain_gather_copies_records() -> None:
    records = torch.randint(0, 256, (EXPERTS, BYTES), dtype=torch.uint8)
    slots = torch.zeros(3, BYTES, dtype=torch.uint8)
    work = posted([2, 0], 2, [-1, -1])
    work.gathers.copy_(torch.tensor([[4, 2], [9, 0]]))
    gather_reference(work, records, slots)
    assert torch.equal(slots[2], records[4])
    assert torch.equal(slots[0], records[9])
    assert (slots[1] == 0).all()
