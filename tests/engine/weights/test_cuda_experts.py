"""Experts on a CUDA device, on the CPU with reference kernels: however they are fetched, the mixture is the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from spillover.engine.cuda.calibrate import best_split
from spillover.engine.cuda.cuda_placement import CudaExperts, fill_table
from spillover.engine.cuda.expert_arena import ExpertArena
from spillover.engine.cuda.expert_stream import MAX_CAPTURED_ROWS
from spillover.engine.cuda.fetched_experts import FetchedExperts
from spillover.engine.cuda.host_share import HostShare
from spillover.engine.cuda.paged_experts import PagedExperts
from spillover.engine.cuda.stream_buffers import StreamBuffers
from spillover.engine.weights.graph_weights import StreamedLayers
from spillover.kernels.moe.experts import Experts, expert_stacks
from spillover.kernels.moe.host_expert_queue import HostExpertQueue
from spillover.kernels.moe.host_experts import ExpertLayout, HostExperts
from spillover.kernels.moe.moe import mixture_reference, moe
from spillover.kernels.moe.page_table import PageTable
from spillover.kernels.moe.records import Record
from spillover.memory.experts import ExpertCache
from spillover.memory.policies.experts import LRUQuota
from spillover.memory.transfer import link_queue
from spillover.memory.transfer.link_queue import LinkQueue
from spillover.models.registry import architecture
from spillover.models.weights import one_expert_of, split_experts
from support import starved
from support.models.loading import dummy_weights

PAGED_TOKENS = 2
UNIT = 2.0**-24  # the largest relative error of one float32 rounding
SIGMAS = 4  # two orders of summation differ by about half of one


def rounding(x: Tensor, scores: Tensor, first: Experts, second: Experts, k: int, renormalize: bool,
             limit: float | None) -> Tensor:
    """Return [T, H]: how far rounding moves a mixture, for any order of its sums, which depends on the vector width.

    The rounding errors of a sum of n products of either sign amount to UNIT * sqrt(n) times the root of the sum of the
    products' squares. A linear multiplies the error of the one before it; independent errors add in squares.
    """
    best, ids = scores.topk(k)
    shares = best.softmax(-1) if renormalize else scores.softmax(-1).gather(-1, ids)

    def product(rows: Tensor, stack: Experts, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the product, the square of its rounding error, and the squared weights."""
        weight = stack.expert(index, torch.float32)
        bias = torch.zeros(len(weight)) if stack.bias is None else stack.bias[index]
        squares = rows.square() @ weight.square().T + bias.square()
        return rows @ weight.T + bias, UNIT**2 * rows.shape[1] * squares, weight.square()

    def expert(index: int, rows: Tensor) -> Tensor:
        both, error, _ = product(rows, first, index)
        if limit is None:
            (gate, up), (gate_error, up_error) = both.chunk(2, -1), error.chunk(2, -1)
            h = gate * gate.sigmoid() * up
        else:
            gate, up = both[:, 0::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit) + 1
            gate_error, up_error = error[:, 0::2], error[:, 1::2]
            h = gate * (1.702 * gate).sigmoid() * up
        # The slope of either gate is at most 1.1, and its value at most its argument; e^x has as many rounding errors
        # as its argument is large.
        own = (2 + 2 * gate.abs()) * UNIT * h
        off = 1.21 * gate_error * up.square() + gate.square() * up_error + own.square()
        out, error, weight = product(h, second, index)
        return error + off @ weight.T + (UNIT * out).square() * (k + 2)

    return moe(x, ids, shares.square(), expert).sqrt()


class Model:
    """Layers of experts in host memory, and slots for some of them."""

    def __init__(self, name: str, quotas: list[int], stream_slots: int) -> None:
        hf = starved.MODELS[name]
        built = architecture(hf)
        self.config = built.config(hf)
        quotas = self.quotas = [min(quota, self.config.num_experts - 1) for quota in quotas]
        made = dummy_weights(built.weight_specs(self.config), torch.float32, torch.device("cpu"),
                             pack=False)
        layers = [split_experts(part)[1] for part in made.parts.values() if "router" in part][: len(quotas)]
        self.record = Record.of(one_expert_of(layers[0]))
        self.stacks = [expert_stacks(layer) for layer in layers]
        self.runs = []
        for layer in layers:
            self.runs.append(torch.empty(self.config.num_experts, self.record.nbytes, dtype=torch.uint8))
            self.record.write_stacks(layer, self.runs[-1])
        self.slots = torch.zeros(sum(quotas) + stream_slots, self.record.nbytes, dtype=torch.uint8)
        for layer, quota in enumerate(quotas):
            self.slots[sum(quotas[:layer]) : sum(quotas[:layer]) + quota] = self.runs[layer][:quota]
        self.arena = ExpertArena(self.slots, self.record)

    def paged(self, host: HostShare | None = None, paged_tokens: int = PAGED_TOKENS) -> PagedExperts:
        quotas, k = self.quotas, self.config.experts_per_token
        streamed = self.slots[sum(quotas) :]
        table = PageTable.make(quotas, self.config.num_experts, paged_tokens * k, 16, torch.device("cpu"),
                               len(streamed))
        fill_table(table, quotas)
        buffers = StreamBuffers(streamed, len(streamed) // 2, None)
        return PagedExperts(self.arena, table, self.runs, buffers, paged_tokens, k, host)

    def check(self, experts: CudaExperts, steps: int, seed: int, tokens: Sequence[int] = (1, 1, 2, 5, 33)) -> None:
        config, rng = self.config, random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            rows = rng.choice(tokens)
            experts.begin_step(rows)
            for layer, (first, second) in enumerate(self.stacks):
                x = torch.randn(rows, config.hidden_size, generator=generator)
                scores = torch.randn(rows, config.num_experts, generator=generator)
                arguments = (config.experts_per_token, True, config.swiglu_limit)
                found = experts.mixture(layer, x, scores, *arguments)
                wanted = mixture_reference(x, scores, first, second, *arguments)
                room = SIGMAS * rounding(x, scores, first, second, *arguments)
                assert ((found - wanted).abs() <= room).all()
            experts.end_step(rows)
            if isinstance(experts, PagedExperts):
                experts.table.check()


@pytest.mark.parametrize("name", starved.MIXTURES)
def test_missing_experts_are_fetched_or_stream_past(name: str) -> None:
    model = Model(name, [9, 10, 9], 6)
    experts = model.paged()
    model.check(experts, steps=12, seed=1)
    assert experts.traffic.expert_misses > 0
    assert experts.traffic.bytes_moved > experts.traffic.expert_misses * model.record.nbytes


def test_experts_that_the_device_fetches_make_the_link_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    model, queue = Model("mixtral", [4, 4], 6), LinkQueue(duplex=True, rate=1e3)
    experts = model.paged()
    monkeypatch.setattr(experts._buffers, "_transfers", SimpleNamespace(queue=queue))
    monkeypatch.setattr(link_queue, "WINDOW", 0.0)
    model.check(experts, steps=12, seed=1, tokens=(1, 2))
    traffic = experts.traffic
    report = queue.report()
    demand = next(each for each in report.transfers if each.priority == "demand")
    assert (demand.copies, demand.bytes) == (traffic.expert_misses, traffic.bytes_moved)
    assert demand.copies > 0
    assert demand.seconds == demand.bytes / 1e3
    assert report.busy is not None
    assert report.busy["to_device"] > 0
    assert experts.traffic == traffic
    assert queue.report().transfers == report.transfers  # nothing was fetched since, and nothing is counted twice


@pytest.mark.parametrize(("name", "quota"), [("gpt-oss", 5), ("qwen3-moe", 9)])
def test_a_step_of_many_tokens_fetches_each_missing_expert_once(name: str, quota: int) -> None:
    """Each missing expert is fetched once, also with fewer slots than experts needed, and with some slots lent."""
    model = Model(name, [quota, quota + 1], 4)
    experts = model.paged(paged_tokens=40)
    lent = [(layer, experts.lend(layer, 2)) for layer in (0, 1)]
    for _, slots in lent:
        experts.arena.slots[slots.start : slots.stop].fill_(255)
    assert experts.paged_tokens == 40
    model.check(experts, steps=5, seed=11)
    traffic = experts.traffic
    assert traffic.bytes_moved == traffic.expert_misses * model.record.nbytes  # nothing was streamed
    assert traffic.expert_misses + traffic.expert_hits <= 5 * 2 * model.config.num_experts
    for layer, slots in lent:
        assert bool((experts.arena.slots[slots.start : slots.stop] == 255).all()) or not slots
        experts.return_slots(layer, slots)
    model.check(experts, steps=2, seed=12)


@pytest.mark.parametrize("name", starved.MIXTURES)
def test_the_host_computes_what_it_is_given(name: str) -> None:
    model = Model(name, [9, 0, 9], 4)
    k = model.config.experts_per_token
    config = model.config
    layout = ExpertLayout(model.record, model.stacks[0][0].weight.format, torch.float32, config.hidden_size,
                          config.expert_intermediate_size, config.num_experts, config.swiglu_limit)
    everything = torch.arange(PAGED_TOKENS * k + 1, dtype=torch.int32)
    with HostExperts(layout, [run.data_ptr() for run in model.runs], threads=2) as cores:
        queue = HostExpertQueue.make(33, 33 * k, model.config.hidden_size, torch.device("cpu"))
        split = [everything // 2, everything, everything // 2]
        experts = model.paged(HostShare(cores, queue, split, lambda rows: 0.5))
        model.check(experts, steps=12, seed=2)
        traffic = experts.traffic
    assert traffic.expert_hosted > 0
    assert traffic.expert_misses > 0


@pytest.mark.parametrize("name", starved.MIXTURES)
def test_on_demand_the_host_does_the_fetching(name: str) -> None:
    model = Model(name, [3, 3], 2)
    cache = ExpertCache(2, model.config.num_experts, 3, LRUQuota())
    for layer in range(2):
        for expert in range(3):
            cache.assign(layer, expert, demand=False)
    experts = FetchedExperts(model.arena, cache, lambda layer, expert: model.runs[layer][expert],
                             torch.Tensor.copy_)
    model.check(experts, steps=8, seed=3)
    cache.check()
    assert experts.traffic.bytes_moved > 0
    lent = [(layer, experts.lend(layer, 4)) for layer in (0, 1) for _ in range(3)]
    assert [len(slots) for _, slots in lent] == [1, 1, 0] * 2
    model.check(experts, steps=4, seed=8)
    cache.check()
    for layer, slots in lent:
        experts.return_slots(layer, slots)
    model.check(experts, steps=4, seed=9)


def test_what_was_lost_in_sleep_is_fetched_again() -> None:
    model = Model("gpt-oss", [9, 9], 4)
    experts = model.paged()
    model.check(experts, steps=4, seed=4)
    experts.sleep()
    experts.wake_up()
    model.check(experts, steps=6, seed=5)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_slots_can_be_lent_and_given_back(name: str) -> None:
    model = Model(name, [12, 12], 4)
    experts = model.paged()
    k = model.config.experts_per_token
    lent = [(layer, experts.lend(layer, 2)) for layer in (0, 1) for _ in range(12)]
    assert sum(len(slots) for _, slots in lent) == 2 * (model.quotas[0] - k - 1)  # slots that a token may need stay
    assert not lent[-1][1]
    assert experts.paged_tokens == min(PAGED_TOKENS, (k + 1 + 4) // k)  # steps of more tokens stream
    for _, slots in lent:
        experts.arena.slots[slots.start : slots.stop].fill_(255)
    model.check(experts, steps=8, seed=6)
    for layer, slots in lent:
        assert bool((experts.arena.slots[slots.start : slots.stop] == 255).all())  # no expert was written there
        experts.return_slots(layer, slots)
    assert experts.paged_tokens == PAGED_TOKENS
    model.check(experts, steps=8, seed=7)


def test_loans_come_and_go_between_steps() -> None:
    """Loans may change between steps: streaming steps see them without reading the device; paging alters the table."""
    model, rng = Model("qwen3-moe", [12, 12], 4), random.Random(10)
    experts = model.paged()
    lent: list[tuple[int, range]] = []
    for turn in range(16):
        layer = rng.randrange(2)
        slots = experts.lend(layer, rng.randint(1, 4)) if rng.random() < 0.6 else range(0)
        if slots:
            experts.arena.slots[slots.start : slots.stop].fill_(255)  # NaN, if read as an expert
            lent.append((layer, slots))
        elif lent:
            experts.return_slots(*lent.pop(rng.randrange(len(lent))))
        taken = [slot for _, slots in lent for slot in slots]
        assert len(taken) == len(set(taken))
        model.check(experts, steps=rng.randint(1, 3), seed=100 + turn)
    assert lent


def test_a_graph_is_good_while_the_page_table_stays() -> None:
    model = Model("qwen3-moe", [12, 12], 4)
    experts = model.paged()

    def version(rows: int) -> int | None:
        experts.begin_step(rows)
        return experts.graph_version(rows)

    assert version(PAGED_TOKENS) == 0
    assert experts.graph_version(33) is None  # what to stream is not planned yet
    first = version(33)
    assert first
    assert version(64) == version(33) == first
    version(1)  # changes the table
    second = version(33)
    assert second != first
    slots = experts.lend(0, 2)
    third = version(33)
    assert third not in (first, second)
    experts.return_slots(0, slots)
    assert version(MAX_CAPTURED_ROWS + 1) is None


def test_layers_that_pass_keep_every_step_from_being_captured() -> None:
    experts = Model("qwen3-moe", [12, 12], 4).paged()
    graphs = StreamedLayers(experts)
    assert graphs.graph_version(1) is None
    assert graphs.max_unpadded_rows == PAGED_TOKENS  # a padded step would stream, but this one pages
    graphs.begin_step(33)
    assert experts.graph_version(33) == 1  # begin_step reached the experts


def test_steps_follow_recorded_routing() -> None:
    model = Model("qwen3-moe", [12, 12], 4)
    experts, k = model.paged(), model.config.experts_per_token
    routing = torch.tensor([[[3, 14], [15, 1]], [[0, 13], [14, 2]]], dtype=torch.int32)
    experts.replay(routing)
    for step in range(1, 4):
        experts.begin_step(1)
        for layer, stacks in enumerate(model.stacks):
            x, scores = torch.randn(1, model.config.hidden_size), torch.randn(1, model.config.num_experts)
            found = experts.mixture(layer, x, scores, k, True, None)
            only = torch.full_like(scores, -torch.inf)
            chosen = routing[step % 2, layer].long()
            only[:, chosen] = scores[:, chosen]
            torch.testing.assert_close(found, mixture_reference(x, only, *stacks, k, True))


def test_link_and_host_share_what_is_missing() -> None:
    assert [best_split(missing, 260e-6, 180e-6) for missing in range(5)] == [0, 0, 1, 2, 2]
    assert best_split(4, 100e-6, 10.0) == 0
    assert best_split(4, 10.0, 1e-6) == 3  # at least one expert is fetched to the device
