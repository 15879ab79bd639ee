"""Experts on the host's cores equal the torch reference, for any caller and any number of threads."""

import os
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spillover.kernels import native
from spillover.kernels.activation import clamped_swiglu_reference, silu_and_mul_reference
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.formats.fp8_block import FP8_BLOCK
from spillover.kernels.formats.gguf_experts import KINDS, GgufExperts
from spillover.kernels.formats.grouped_int import GroupedInt
from spillover.kernels.formats.int_experts import IntExperts, words_of
from spillover.kernels.formats.mxfp4 import MXFP4
from spillover.kernels.linear import linear_reference
from spillover.kernels.moe.host_expert_queue import COUNT, DONE, FAILED, LAYER, POSTED, TOKENS, HostExpertQueue
from spillover.kernels.moe.host_experts import TILE_ROWS, ExpertLayout, HostExperts, host_experts_reference

needs_native = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")

EXPERTS = 5
LAYOUTS = {
    "mxfp4, clamped": ExpertLayout.packed(MXFP4, torch.bfloat16, 160, 288, EXPERTS, 1.0, biased=True),
    "mxfp4": ExpertLayout.packed(MXFP4, torch.float32, 64, 32, EXPERTS),
    "fp8": ExpertLayout.packed(FP8_BLOCK, torch.bfloat16, 384, 256, EXPERTS),
    "fp8, blocks partly empty": ExpertLayout.packed(FP8_BLOCK, torch.bfloat16, 200, 150, EXPERTS, biased=True),
    "fp8, clamped": ExpertLayout.packed(FP8_BLOCK, torch.float16, 136, 130, EXPERTS, 1.0),
    "fp8, bfloat16, clamped": ExpertLayout.packed(FP8_BLOCK, torch.bfloat16, 1100, 130, EXPERTS, 1.0),
    "bfloat16": ExpertLayout.packed(DENSE, torch.bfloat16, 256, 96, EXPERTS),
    "bfloat16, clamped": ExpertLayout.packed(DENSE, torch.bfloat16, 129, 67, EXPERTS, 1.0, biased=True),
    "int4": ExpertLayout.packed(IntExperts(GroupedInt(4, 32)), torch.bfloat16, 256, 128, EXPERTS),
    "int4, groups of 128": ExpertLayout.packed(IntExperts(GroupedInt(4, 128)), torch.float16, 128, 256, EXPERTS),
    "int8": ExpertLayout.packed(IntExperts(GroupedInt(8, 64)), torch.bfloat16, 128, 128, EXPERTS, 1.0, biased=True),
    "GGUF, 4 bits": ExpertLayout.packed(GgufExperts(*KINDS[0]), torch.bfloat16, 256, 128, EXPERTS),
    "GGUF, 8 bits": ExpertLayout.packed(GgufExperts(*KINDS[1]), torch.bfloat16, 128, 128, EXPERTS, 1.0, biased=True),
    "GGUF, halves": ExpertLayout.packed(GgufExperts(*KINDS[2]), torch.float16, 128, 256, EXPERTS),
    "GGUF, halves and offsets": ExpertLayout.packed(GgufExperts(*KINDS[3]), torch.bfloat16, 128, 128, EXPERTS),
    "float16": ExpertLayout.packed(DENSE, torch.float16, 47, 33, EXPERTS, biased=True),
    "float32": ExpertLayout.packed(DENSE, torch.float32, 31, 5, EXPERTS, biased=True),
}
EVERY = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
NEVER, ALWAYS = 0, 1  # values of tile_rows
ROUNDINGS = 2  # allowed per row in the other direction; each occurs with a probability of about one in a thousand


def random_records(layout: ExpertLayout, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    records = torch.empty(layout.experts, layout.record.nbytes, dtype=torch.uint8).fill_(0xFF)  # NaN between tensors
    for stack in layout.stacks(records):
        noise = torch.randn(stack.values.shape, generator=generator)
        if stack.weight.format == MXFP4:
            assert stack.scales is not None
            stack.values.random_(0, 256, generator=generator)
            stack.scales.random_(118, 126, generator=generator)
            stack.scales[0, 0, 0] = 0  # the smallest scale, a subnormal float
        elif isinstance(stack.weight.format, IntExperts):
            assert stack.scales is not None
            stack.values.random_(0, 256, generator=generator)
            scales = torch.rand(stack.scales.shape, generator=generator) * 0.02
            stack.scales.copy_(words_of(scales, torch.randint(0, 16, scales.shape, generator=generator)))
        elif isinstance(stack.weight.format, GgufExperts):
            assert stack.scales is not None
            stack.values.random_(0, 256, generator=generator)
            stack.scales.copy_(torch.randn(stack.scales.shape, generator=generator) * 0.01)
        elif stack.weight.format == FP8_BLOCK:
            assert stack.scales is not None
            stack.values.copy_((noise * 20).to(torch.float8_e4m3fn))
            stack.values[0, 0, 0] = 2**-9  # subnormal
            stack.scales.copy_(torch.rand(stack.scales.shape, generator=generator) * 0.02)
        else:
            stack.values.copy_(noise * stack.width**-0.5)
        if stack.bias is not None:
            stack.bias.copy_(torch.randn(stack.bias.shape, generator=generator))
    return records


def all_pairs(tokens: int) -> Tensor:
    """Return pairs in random order: expert e gets each token t with t % (e + 1) != 0; expert 0 all, the last none."""
    pairs = [[t, e, t * EXPERTS + e, 0] for e in range(EXPERTS - 1) for t in range(tokens) if e == 0 or t % (e + 1)]
    return torch.tensor(pairs, dtype=torch.int32)[torch.randperm(len(pairs))]


def random_rows(layout: ExpertLayout, tokens: int) -> Tensor:
    """Return rows in the precision of the layout's type."""
    return torch.randn(tokens, layout.hidden).to(layout.dtype).float()


def check(
    out: Tensor, experts: HostExperts, records: Tensor, x: Tensor, pairs: Tensor, tile_rows: int = TILE_ROWS
) -> None:
    wanted = host_experts_reference(experts.layout, records, x, pairs)
    if not experts.tiled:  # large terms are summed in another order
        torch.testing.assert_close(out, wanted, rtol=0.0, atol=5e-6 * float(wanted.abs().max()) if len(wanted) else 0.0)
        return
    experts_of_rows = pairs[:, 1].long()
    tiled = (torch.bincount(experts_of_rows)[experts_of_rows] >= tile_rows)[:, None]
    wanted = torch.where(tiled, host_experts_reference(experts.layout, records, x, pairs, rounded=True), wanted)
    top = float(wanted.abs().max()) if len(wanted) else 0.0
    slack = max(1e-4, 5e-6 * top) + torch.where(tiled, ROUNDINGS * one_rounding(experts.layout, records, x, pairs), 0.0)
    excess = (out - wanted).abs() - 1e-4 * wanted.abs() - slack
    assert not (excess > 0).any(), f"{int((excess > 0).sum())} of {excess.numel()}, by {float(excess.max())}"


def one_rounding(layout: ExpertLayout, records: Tensor, x: Tensor, pairs: Tensor) -> Tensor:
    """Return [n, H]: how far an output moves if one activation, summed in another order, is rounded in the other
    direction: at most 2^-7 of its largest term."""
    first, second = layout.stacks(records)
    out = torch.empty(len(pairs), layout.hidden)
    for row, (token, expert) in enumerate(pairs[:, :2].tolist()):
        bias = None if first.bias is None else first.bias[expert].float()
        weight = first.expert(expert, torch.float32).float()
        gate_up = linear_reference(x[None, token].bfloat16().float(), weight, bias)
        h = silu_and_mul_reference(gate_up) if layout.limit is None else clamped_swiglu_reference(gate_up, layout.limit)
        out[row] = (second.expert(expert, torch.float32).float() * h).abs().amax(1) * 2**-7
    return out


@needs_native
@EVERY
@pytest.mark.parametrize("tile_rows", [NEVER, ALWAYS, TILE_ROWS])
def test_rows_go_through_their_experts(layout: ExpertLayout, tile_rows: int) -> None:
    records, x, pairs = random_records(layout), random_rows(layout, 11), all_pairs(11)
    with HostExperts(layout, [0, records.data_ptr()], threads=3, tile_rows=tile_rows) as experts:
        check(experts.run(1, x, pairs), experts, records, x, pairs, tile_rows)


@needs_native
@EVERY
@pytest.mark.parametrize("tile_rows", [NEVER, ALWAYS])
def test_a_row_has_the_same_bits_beside_other_rows_and_on_any_number_of_threads(
    layout: ExpertLayout, tile_rows: int
) -> None:
    records, x, pairs = random_records(layout), torch.randn(19, layout.hidden), all_pairs(19)
    with HostExperts(layout, [records.data_ptr()], threads=1, grain=1, tile_rows=tile_rows) as one:
        wanted = torch.cat([one.run(0, x, pair[None]) for pair in pairs])
    for threads, grain in ((1, 1 << 20), (2, 2000), (5, 1)):
        with HostExperts(layout, [records.data_ptr()], threads, grain, tile_rows) as experts:
            assert torch.equal(experts.run(0, x, pairs), wanted)


@needs_native
@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(LAYOUTS)), sizes=st.lists(st.integers(0, 40), min_size=EXPERTS, max_size=EXPERTS),
    threads=st.integers(1, 4), seed=st.integers(0, 99),
)
def test_experts_of_few_rows_and_of_many_share_a_request(
    name: str, sizes: list[int], threads: int, seed: int
) -> None:
    layout, generator = LAYOUTS[name], torch.Generator().manual_seed(seed)
    records, x = random_records(layout, seed), random_rows(layout, 40)
    pairs = torch.zeros(sum(sizes), 4, dtype=torch.int32)
    pairs[:, 0] = torch.randint(0, 40, (len(pairs),), generator=generator)
    pairs[:, 1] = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(sizes))
    pairs = pairs[torch.randperm(len(pairs), generator=generator)]
    with (
        HostExperts(layout, [records.data_ptr()], threads) as experts,
        HostExperts(layout, [records.data_ptr()], 1, tile_rows=NEVER) as plain,
    ):
        out = experts.run(0, x, pairs)
        check(out, experts, records, x, pairs)
        for expert, size in enumerate(sizes):
            own = pairs[:, 1] == expert  # other pairs of the call make no difference
            assert torch.equal(out[own], experts.run(0, x, pairs[own]))
            if size < TILE_ROWS:
                assert torch.equal(out[own], plain.run(0, x, pairs[own]))


@needs_native
def test_every_code_is_exact_in_tiles() -> None:
    layout = ExpertLayout.packed(FP8_BLOCK, torch.bfloat16, 256, 256, experts=1)
    records = torch.zeros(1, layout.record.nbytes, dtype=torch.uint8)
    gate_up, down = layout.stacks(records)
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0  # NaN codes
    for stack in (gate_up, down):
        assert stack.scales is not None
        stack.scales.fill_(1.0)
    gate_up.values[0] = torch.eye(256).repeat(2, 1).to(torch.float8_e4m3fn)
    down.values[0] = codes.view(torch.float8_e4m3fn)[:, None].expand(256, 256)
    x, pairs = torch.zeros(1, 256), torch.zeros(1, 4, dtype=torch.int32)
    x[0, 7] = 32.0  # silu(32) * 32 is 1024
    with HostExperts(layout, [records.data_ptr()], threads=1, tile_rows=ALWAYS) as experts:
        out = experts.run(0, x, pairs)
    assert torch.equal(out[0], codes.view(torch.float8_e4m3fn).float() * 1024)


@needs_native
@settings(max_examples=30, deadline=None)
@given(hidden=st.integers(1, 300), inner=st.integers(1, 300), tokens=st.integers(0, 20), seed=st.integers(0, 99))
def test_a_dense_mlp_is_a_layer_of_one_expert(hidden: int, inner: int, tokens: int, seed: int) -> None:
    layout = ExpertLayout.packed(DENSE, torch.bfloat16, hidden, inner, experts=1, biased=True)
    records, x = random_records(layout, seed), random_rows(layout, tokens)
    pairs = torch.zeros(tokens, 4, dtype=torch.int32)
    pairs[:, 0] = torch.arange(tokens)
    with HostExperts(layout, [records.data_ptr()], threads=2) as experts:
        check(experts.run(0, x, pairs), experts, records, x, pairs)


@needs_native
def test_what_is_not_there_is_refused() -> None:
    layout = LAYOUTS["float32"]
    records, x = random_records(layout), torch.randn(2, layout.hidden)
    with HostExperts(layout, [records.data_ptr(), 0], threads=2) as experts:
        wrong = ((0, 2, 0), (0, -1, 0), (0, 0, EXPERTS), (0, 0, -1), (1, 0, 0), (2, 0, 0), (-1, 0, 0))
        for layer, token, expert in wrong:
            with pytest.raises(IndexError, match="no such layer, token or expert"):
                experts.run(layer, x, torch.tensor([[token, expert, 0, 0]]))
        experts.run(0, x, torch.tensor([[1, 4, 0, 0]]))


@needs_native
def test_closing_ends_the_threads() -> None:
    tasks = "/proc/self/task"
    if not os.path.isdir(tasks):
        pytest.skip("no list of threads")
    layout = LAYOUTS["float32"]
    records = random_records(layout)
    queue = HostExpertQueue.make(1, 1, layout.hidden, torch.device("cpu"))
    before = len(os.listdir(tasks))
    experts = HostExperts(layout, [records.data_ptr()], threads=4)
    experts.attach(queue)
    assert len(os.listdir(tasks)) == before + 4
    experts.close()
    experts.close()
    assert len(os.listdir(tasks)) == before
    experts = HostExperts(layout, [records.data_ptr()], threads=4)
    experts.attach(queue)
    del experts  # also if it is never closed
    assert len(os.listdir(tasks)) == before


class Device:
    """The device's end of the host expert queue."""

    def __init__(self, layout: ExpertLayout) -> None:
        self.queue = HostExpertQueue.make(8, 40, layout.hidden, torch.device("cpu"))
        self.turn = 0

    def ask(self, layer: int, x: Tensor, pairs: Tensor) -> Tensor:
        header = self.queue.header
        self.queue.x[: len(x)] = x
        self.queue.pairs[: len(pairs)] = pairs
        header[LAYER], header[COUNT], header[TOKENS] = layer, len(pairs), len(x)
        self.turn += 1
        header[POSTED] = self.turn
        deadline = time.monotonic() + 60
        while header[DONE] != self.turn:
            assert time.monotonic() < deadline, "no answer"
            time.sleep(1e-4)
        return self.queue.out[: len(pairs)].clone()


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("no C++ compiler")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["mxfp4, clamped", "fp8", "bfloat16"])
def test_mail_is_answered_turn_after_turn(name: str) -> None:
    layout = LAYOUTS[name]
    layers = [random_records(layout, seed) for seed in (1, 2)]
    device = Device(layout)
    with HostExperts(layout, [records.data_ptr() for records in layers], threads=3) as experts:
        experts.attach(device.queue)
        for turn in range(12):
            if turn % 4 == 0:
                experts.wake()
            if turn == 6:
                time.sleep(0.02)  # the threads fall asleep, and are not woken
            layer, x, pairs = turn % 2, random_rows(layout, 1 + turn % 8), all_pairs(1 + turn % 8)
            check(device.ask(layer, x, pairs), experts, layers[layer], x, pairs)
            if turn % 3 == 0:  # a direct call in between
                check(experts.run(layer, x, pairs), experts, layers[layer], x, pairs)
    assert not device.queue.failed


@pytest.mark.usefixtures("kernels")
def test_mail_without_sense_is_answered_as_failed() -> None:
    layout = LAYOUTS["float32"]
    records, x = random_records(layout), torch.randn(2, layout.hidden)
    device = Device(layout)
    with HostExperts(layout, [records.data_ptr()], threads=2) as experts:
        experts.attach(device.queue)
        device.ask(0, x, torch.tensor([[1, 0, 0, 0]]))
        assert not device.queue.failed
        device.ask(1, x, torch.tensor([[1, 0, 0, 0]]))
        assert device.queue.failed
        device.queue.header[FAILED] = 0
        device.ask(0, x, torch.tensor([[1, EXPERTS, 0, 0]]))
        assert device.queue.failed


@pytest.mark.usefixtures("kernels")
def test_mail_that_was_posted_before_is_answered_too() -> None:
    layout = LAYOUTS["float32"]
    records, x, pairs = random_records(layout), torch.randn(2, layout.hidden), torch.tensor([[1, 3, 0, 0]])
    first, second = Device(layout), Device(layout)
    with HostExperts(layout, [records.data_ptr()], threads=2) as experts:
        experts.attach(first.queue)
        wanted = first.ask(0, x, pairs)
        experts.attach(second.queue)
        assert torch.equal(second.ask(0, x, pairs), wanted)
        first.queue.header[POSTED] = 7
        experts.attach(first.queue)
        first.turn = 7
        assert torch.equal(first.ask(0, x, pairs), wanted)
