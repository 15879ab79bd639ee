"""Weights in managed memory: the tokens of a resident model, within the planned memory, in whatever order two streams
run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.engine.weights.managed import ManagedExperts, ManagedWeights
from spillover.engine.weights.placed import Parts
from spillover.kernels.huge_pages import map_pages
from spillover.kernels.moe.experts import ExpertWeights, expert_stacks
from spillover.kernels.moe.paged_moe import begin_passes
from spillover.memory.managed.emulated import PAGE, EmulatedMemory
from spillover.memory.managed.pages import FAULT_AROUND, Pages
from spillover.memory.managed.residency import Residency
from spillover.memory.transfer.cpu_transfers import CpuTransfers
from spillover.models.loader import dummy_parts
from spillover.models.registry import architecture
from spillover.plan.placement import MANAGED, WeightPlan
from support import starved

_resident: dict[str, starved.Answers] = {}


def resident(name: str, folder: str) -> starved.Answers:
    if name not in _resident:
        _resident[name] = starved.answer(folder, starved.prompts(2))
    return _resident[name]


@pytest.mark.parametrize("strategy", MANAGED)
@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_tokens_are_those_of_a_resident_model(name: str, strategy: str, tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    folder = starved.write_config(tmp_path, name)
    whole = resident(name, folder)
    least = starved.least(folder, weights=strategy)
    budget = random.Random(f"{name}{strategy}").randint(least, (least + whole.plan.weight_bytes) // 2)
    mapped = watched(monkeypatch)
    found = starved.answer(folder, starved.prompts(2), weights=strategy, gpu_memory=str(budget))
    assert found.tokens == whole.tokens
    placement, traffic = found.plan.placement, found.traffic
    assert placement is not None
    assert found.plan.device_bytes <= budget
    assert found.host_bytes == placement.host_bytes == placement.managed_bytes
    assert 0 < max(mapped) <= placement.device_bytes
    assert 0 < found.weights.peak_bytes <= placement.device_bytes
    assert traffic.bytes_moved > placement.managed_bytes
    assert (traffic.bytes_back > 0) == (strategy != "uvm-advise")
    if strategy == "uvm-prefetch":  # everything is prefetched before its use
        assert traffic.faults == 0
    else:
        assert traffic.faults * PAGE > placement.managed_bytes
    assert (traffic.expert_misses > 0) == (name != "llama")
    assert any(f"--weights {strategy} is emulated" in note for note in found.plan.notes)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the bytes on the "device" after each part was entered."""
    mapped: list[int] = []
    enter = ManagedWeights.enter

    def entered(weights: ManagedWeights, index: int) -> Any:
        pages = weights._pages
        assert isinstance(pages, EmulatedMemory)
        with pages._counting:  # no page moves while they are counted
            mapped.append(PAGE * sum(pages.mapped(part.all_pages) for part in weights._parts))
        return enter(weights, index)

    monkeypatch.setattr(ManagedWeights, "enter", entered)
    return mapped


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe-fp8", "gpt-oss"])
def test_a_pass_over_managed_experts_is_the_mixture_and_touches_no_other(name: str) -> None:
    hf = starved.MODELS[name]
    built = architecture(hf)
    config = built.config(hf)
    specs = {"layers.0": built.weight_specs(config)["layers.0"]}
    (_, part), = dummy_parts(specs, torch.float32, torch.device("cpu"), seed=0)
    copier = CpuTransfers()
    plan = WeightPlan("uvm", {}, {}, device_bytes=1 << 30)
    memory = EmulatedMemory(copier)
    weights = ManagedWeights([("layers.0", part)], plan, memory, torch.device("cpu"))
    experts = weights.enter(0)["experts"]
    assert isinstance(experts, ManagedExperts)
    first, second = expert_stacks(cast(ExpertWeights, part))
    torch.manual_seed(0)
    x, scores = torch.randn(3, config.hidden_size), torch.randn(3, config.num_experts)
    k, limit = config.experts_per_token, config.swiglu_limit
    resident = begin_passes(x, scores, k, True, first.gemm, second.width, limit)
    resident.add(first, second, torch.arange(config.num_experts, dtype=torch.int32))
    assert torch.equal(experts.in_one_pass(x, scores, k, True, limit), resident.end())
    chosen = set(scores.topk(k).indices.flatten().tolist())
    mapped = {index for index, pages in enumerate(weights._parts[0].pages[1:]) if memory.mapped(pages)}
    assert mapped == chosen
    weights.close()
    copier.close()


class TwoStreams:
    """A device's pages, moved by two streams whose interleaving a test chooses afterwards."""

    faults = None

    def __init__(self) -> None:
        self.streams: tuple[list[Any], list[Any]] = ([], [])  # of steps, and of prefetches

    def allocate(self, nbytes: int) -> memoryview:
        return map_pages(nbytes)

    def to_device(self, pages: Sequence[Pages], ahead: bool = False) -> None:
        self.streams[ahead].append(("bring", pages))

    def to_host(self, pages: Sequence[Pages], ahead: bool = False) -> None:
        self.streams[ahead].append(("leave", pages))

    def begin_prefetch(self) -> None:
        self.streams[True].append(("after", len(self.streams[False])))

    def wait(self) -> None:
        self.streams[False].append(("after", len(self.streams[True])))

    def advise(self, pages: Sequence[Pages], advised: bool) -> None:
        pass

    def use(self, pages: Sequence[Pages]) -> None:
        self.streams[False].append(("use", pages))

    def run(self, turns: random.Random) -> tuple[int, int]:
        """Run the streams; return the most bytes on the device, and the bytes that were fetched by page faults."""
        done, here, most, touched = [0, 0], set[int](), 0, 0
        while any(done[each] < len(stream) for each, stream in enumerate(self.streams)):
            ready = [each for each, stream in enumerate(self.streams) if done[each] < len(stream) and not (
                stream[done[each]][0] == "after" and done[1 - each] < stream[done[each]][1])]
            stream = turns.choice(ready)  # empty if the streams wait for each other
            kind, pages = self.streams[stream][done[stream]]
            done[stream] += 1
            if kind == "after":
                continue
            moved = {page for each in pages for page in range(each.address, each.address + each.nbytes, FAULT_AROUND)}
            touched += FAULT_AROUND * len(moved - here) * (kind == "use")
            here = here - moved if kind == "leave" else here | moved
            most = max(most, FAULT_AROUND * len(here))
        return most, touched


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MANAGED), st.booleans(), st.integers(0, 6), st.integers(0, 2**32))
def test_no_order_of_streams_brings_more_than_there_is_room_for(strategy: str, mixture: bool, spare: int,
                                                                seed: int) -> None:
    rng, experts = random.Random(seed), 4 if mixture else 0
    parts: Parts = [(f"layers.{layer}", {"norm": torch.zeros(1)}) for layer in range(5)]
    memory = TwoStreams()
    room = (2 if strategy == "uvm-prefetch" else 1) * (1 + experts) + spare
    plan = WeightPlan("uvm", {}, {}, device_bytes=room * FAULT_AROUND)
    weights = with_experts(ManagedWeights(parts, plan, memory, torch.device("cpu")), plan, experts)
    weights.follow(strategy)
    for stream in memory.streams:  # discards what loading queued
        stream.clear()
    for _ in range(3):
        rows = rng.choice([1, 8])
        for index in range(5):
            weights.enter(index)
            pages = weights._parts[index].pages
            memory.use([pages[0]])
            if mixture:
                chosen = sorted(rng.sample(range(experts), rng.randint(1, min(rows, experts))))
                weights.use_experts(index, chosen, rows)
                memory.use([pages[0], *(pages[1 + expert] for expert in chosen)])
    weights.close()
    most, touched = memory.run(rng)
    assert most <= plan.device_bytes
    assert weights.peak_bytes <= plan.device_bytes
    traffic = weights.traffic()
    if strategy == "uvm-prefetch":
        assert touched == 0
    else:
        assert touched == traffic.bytes_moved > 0


def with_experts(weights: ManagedWeights, plan: WeightPlan, count: int) -> ManagedWeights:
    """Return the same parts, each with the pages of `count` experts added."""
    for index, part in enumerate(weights._parts):
        start = (100 + 10 * index) * FAULT_AROUND
        weights._parts[index] = replace(part, pages=tuple(Pages(start + unit * FAULT_AROUND, FAULT_AROUND)
                                                          for unit in range(1 + count)),
                                        filled=(FAULT_AROUND,) * (1 + count))
    sizes = {(index, unit): FAULT_AROUND for index in range(len(weights._parts)) for unit in range(1 + count)}
    weights._residency = Residency(sizes, plan.device_bytes)
    return weights
