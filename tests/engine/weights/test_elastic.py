"""KV borrows expert slots as contexts grow, and returns them: no token changes, and every block has one owner."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover import LLM, SamplingParams
from spillover.engine.requests.request import Status
from spillover.engine.weights.elastic import ElasticMemory, SlotLender
from spillover.memory.kv.kv_cache import KVCache
from support import starved
from support.tiered_world import SIZE, World, prompt


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_contexts_that_outgrow_their_blocks_take_slots(name: str, caching: bool, tmp_path: Path) -> None:
    folder = starved.write_config(tmp_path, name)
    flags = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 160, "max_num_seqs": 6,
             "max_num_batched_tokens": 64, "enable_prefix_caching": caching}
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    asked = [[*prompt, *range(60)] for prompt in starved.prompts(6)]
    with LLM(folder, **flags) as llm:
        whole = [output.outputs[0].token_ids for output in llm.generate(asked, params, use_tqdm=False)]
        budget = int((0.6 if name == "qwen3-moe" else 0.9) * (llm.plan.weight_bytes + llm.plan.workspace_bytes))
    with LLM(folder, weights="experts", gpu_memory=str(budget), **flags) as llm:
        loans = llm.engine.scheduler.kv.loans
        lender = loans.lender
        assert isinstance(lender, SlotLender)
        most, lend = [0], lender.lend
        lender.lend = lambda blocks: _noted(lend(blocks), most, lender)
        found = [output.outputs[0].token_ids for output in llm.generate(asked, params, use_tqdm=False)]
        assert found == whole
        assert most[0] > 0
        assert llm.engine.runner.weights.traffic().expert_misses > 0
        assert loans.blocks == 0  # all loans are returned once unused
        assert lender.slots == 0
        llm.engine.runner.weights.experts.slots.cache.check()
        llm.engine.scheduler.kv.check()
        again = [output.outputs[0].token_ids for output in llm.generate(asked, params, use_tqdm=False)]
        assert again == whole


def _noted(loans: list[Sequence[int]], most: list[int], lender: object) -> list[Sequence[int]]:
    most[0] = max(most[0], lender.slots)  # type: ignore[attr-defined]
    return loans


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5000), st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(1, 40),
       st.integers(1, 900))
def test_a_block_lies_in_one_run_of_slots_or_in_none(kv_blocks: int, runs: list[int], slot_lines: int,
                                                     block: int) -> None:
    memory = ElasticMemory(torch.empty(0), (kv_blocks % 50 + 1) * block, slot_lines * 256)
    seen: set[int] = set()
    start, at = -(-memory.kv_bytes // 256) * 256, 0
    for count in runs:
        blocks = memory.blocks_in(range(at, at + count), block)
        begin, end = start + at * memory.slot_bytes, start + (at + count) * memory.slot_bytes
        assert seen.isdisjoint(blocks)
        seen |= set(blocks)
        inside = [number for number in range(begin // block, end // block + 1)
                  if begin <= number * block and (number + 1) * block <= end]
        assert list(blocks) == inside
        at += count


class Lender:
    """Lends ranges of blocks, and requires each to be returned whole."""

    def __init__(self, loans: list[range]) -> None:
        self.here = loans

    def lend(self, blocks: int) -> list[Sequence[int]]:
        taken = []
        while self.here and sum(map(len, taken)) < blocks:
            taken.append(self.here.pop())
        return taken

    def return_loan(self, loan: Sequence[int]) -> None:
        self.here.append(loan)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("windows", [(None,), (None, 16)])
def test_loans_come_and_go_under_any_sequence_of_requests(seed: int, windows: tuple[int | None, ...]) -> None:
    rng = random.Random(seed)
    lender = Lender([range(start, start + 7) for start in range(13, 55, 7)])
    kv = KVCache(12, 4, windows, most_blocks=60, lender=lender)
    live: dict[str, list[int]] = {}
    for step in range(300):
        if rng.random() < 0.5 and len(live) < 4:
            name = f"r{step}"
            live[name] = [rng.randrange(3) for _ in range(rng.randint(1, 40))]
            kv.admit(name, live[name])
        elif live:
            name = rng.choice(sorted(live))
            tokens = live[name]
            needed = kv.blocks_needed(name, len(tokens))
            if not kv.extend(name, len(tokens)) and kv.grow(needed - kv.num_free):
                kv.extend(name, len(tokens))
            if kv.blocks_needed(name, len(tokens)) == 0:
                kv.commit(name, tokens, len(tokens))
            if rng.random() < 0.6:
                kv.release(name)
                del live[name]
        kv.shrink()
        kv.check()
        assert kv.loans.blocks + sum(len(loan) for loan in lender.here) == 42
        assert kv.num_total == 12 + kv.loans.blocks
    for name in live:
        kv.release(name)
    while kv.shrink():
        kv.check()
    assert kv.loans.blocks == 0


@settings(max_examples=60, deadline=None)
@given(own=st.integers(8, 40), sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4),
       windows=st.sampled_from([(None,), (None, 16)]), lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
       caching=st.booleans())
def test_all_loans_are_back_once_nobody_runs(own: int, sizes: list[int], windows: tuple[int | None, ...],
                                             lengths: list[int], caching: bool) -> None:
    """All loans are returned when no request runs, whatever their size, which may exceed the cache's own blocks."""
    starts = [own + 1 + sum(sizes[:index]) for index in range(len(sizes))]
    lender = Lender([range(start, start + size) for start, size in zip(starts, sizes, strict=True)])
    kv = KVCache(own, 4, windows, prefix_caching=caching, most_blocks=own + sum(sizes), lender=lender)
    for index, length in enumerate(lengths):
        name, tokens = f"r{index}", [index] * length
        kv.admit(name, tokens)
        kv.grow(kv.blocks_needed(name, length) - kv.num_free)
        if kv.extend(name, length):
            kv.commit(name, tokens, length)
        else:
            kv.release(name)
            lengths[index] = 0
    for index, length in enumerate(lengths):
        if length:
            kv.release(f"r{index}")
    while kv.shrink():
        kv.check()
    assert (kv.loans.blocks, sum(map(len, lender.here))) == (0, sum(sizes))


def test_a_loan_larger_than_the_planned_blocks_goes_back_with_the_last_request() -> None:
    lender = Lender([range(13, 51)])
    world = World(12, host=0, tokens=64, most_blocks=50, lender=lender)
    requests = [world.request(prompt(seed, 30), 8) for seed in range(5)]
    lent = 0
    while any(request.status is not Status.FINISHED for request in requests):
        world.engine.step()
        lent = max(lent, world.kv.loans.blocks)
    world.run()
    assert lent == 38
    assert world.kv.loans.blocks == 0
    world.engine.scheduler.check()
    world.close()


@pytest.mark.parametrize("seed", range(4))
def test_prefixes_in_a_loan_are_spilled_before_it_goes_back(seed: int) -> None:
    """Prefix blocks that were only in borrowed slots are found in the tier below, and none is lost."""
    rng = random.Random(seed)
    lender = Lender([range(start, start + 7) for start in range(25, 67, 7)])
    world = World(24, host=200, tokens=64, most_blocks=70, lender=lender)
    asked = [prompt(rng.randrange(10**6), rng.randrange(20, 80)) for _ in range(8)]
    lent = 0
    for start in range(0, 8, 4):
        requests = [world.request(text, 4) for text in asked[start : start + 4]]
        while any(request.status is not Status.FINISHED for request in requests):
            world.engine.step()
            lent = max(lent, world.kv.loans.blocks)
        world.run()
    assert lent > 0
    assert world.kv.loans.blocks == 0, "nobody needs the loans, and copies have ended"
    assert sum(map(len, lender.here)) == 42
    assert world.store.dropped == 0
    for text in asked:
        found = world.ask(text, 1).sources
        assert found is not None
        assert found.computed <= len(text) - (len(text) - 1) // SIZE * SIZE, found
    world.close()
