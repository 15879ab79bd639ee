"""Real engines share one pool: the same tokens whichever engine computed a prefix, and whichever was killed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spillover import LLM, SamplingParams
from spillover.errors import SpilloverError
from spillover.memory.shared_pool import tier
from spillover.memory.spill import spiller
from spillover.memory.spill.report import TierReport
from support.models.hf_reference import VOCAB, greedy, save_checkpoint, tiny_model
from support.pool_process import PoolProcess, mapped_pools

BLOCK = 8
LENGTH = 6
WHOLE = 112  # tokens restored of a prompt of 120: whole blocks, and at least one token is always computed
PARAMS = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)


class Tiny:
    def __init__(self, folder: Path, name: str, seed: int = 11) -> None:
        self.hf, _ = tiny_model(name, seed=seed)
        self.path = str(save_checkpoint(self.hf, folder))

    def open(self, pool: PoolProcess, **flags: Any) -> LLM:
        options = {"skip_tokenizer_init": True, "block_size": BLOCK, "max_model_len": 192,
                   "num_gpu_blocks_override": 60, "restore": "always", "spill": "eager", "host_pool": str(pool.path)}
        return LLM(self.path, **{**options, **flags})

    def ask(self, llm: LLM, prompt: list[int], salt: str | None = None) -> int:
        """Check the answer to a prompt; return how many prompt tokens came from the pool."""
        output = llm.generate(prompt, PARAMS, use_tqdm=False, cache_salt=salt)[0]
        assert output.outputs[0].token_ids == greedy(self.hf, prompt, LENGTH)
        assert output.sources.total == len(prompt)
        settle(llm)
        return output.sources.pool


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture
def pool() -> Iterator[PoolProcess]:
    with PoolProcess(16 << 20) as process:
        yield process


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen timeouts, so that no block is lost because the pool's process is slow on a busy machine."""
    monkeypatch.setattr(tier, "TIMEOUT_SECONDS", 20.0)
    monkeypatch.setattr(tier, "LOOKUP_SECONDS", 20.0)
    monkeypatch.setattr(spiller, "LOSSY_AFTER_SECONDS", 30.0)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(120)] for _ in range(count)]


def settle(llm: LLM) -> None:
    until(lambda: not llm.engine.scheduler.connector.busy or llm.engine.step() is None)


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def report(llm: LLM) -> TierReport:
    (found,) = (each for each in llm.engine.scheduler.connector.reports() if each.name == "pool")
    return found


def available(llm: LLM) -> bool:
    return report(llm).available


def test_a_second_engine_is_served_what_the_first_computed(tiny: Tiny, pool: PoolProcess) -> None:
    prompt, other = prompts(2)
    with tiny.open(pool) as one, tiny.open(pool) as two:
        assert tiny.ask(one, prompt, "tenant") == 0
        stored = report(one).bytes_in
        assert stored >= WHOLE // BLOCK * one.plan.slot_bytes
        assert tiny.ask(two, prompt, "tenant") == WHOLE
        assert report(two).bytes_out == WHOLE // BLOCK * two.plan.slot_bytes
        assert tiny.ask(two, prompt, "another") == tiny.ask(two, prompt) == 0, "a salt was not respected"
        assert tiny.ask(two, other, "tenant") == 0
        written = report(one).bytes_in + report(two).bytes_in
        held = pool.report()
        assert written == held.models[0].bytes == held.models[0].stores * two.plan.slot_bytes, "a block is there twice"
        assert (held.engines, len(held.models)) == (2, 1)
    until(lambda: pool.report().engines == 0)
    assert mapped_pools() == 0


def test_a_restarted_engine_is_warm(tiny: Tiny, pool: PoolProcess) -> None:
    asked = prompts(4, seed=1)
    with tiny.open(pool, spill="evict") as llm:
        assert [tiny.ask(llm, prompt) for prompt in asked] == [0] * 4
    with tiny.open(pool) as llm:
        assert [tiny.ask(llm, prompt) for prompt in asked] == [WHOLE] * 4


def test_an_owner_killed_and_started_again(tiny: Tiny, pool: PoolProcess) -> None:
    asked = prompts(6, seed=2)
    with tiny.open(pool, num_gpu_blocks_override=40) as llm:
        for turn in range(3):
            for prompt in asked:
                tiny.ask(llm, prompt)
            assert sum(tiny.ask(llm, prompt) for prompt in asked) > 3 * WHOLE, turn
            pool.kill()
            assert [tiny.ask(llm, prompt) for prompt in asked[:3]] == [0] * 3
            assert not available(llm)
            pool.start()
            until(lambda: available(llm))


def test_a_stopped_owner_holds_nobody_up(tiny: Tiny, pool: PoolProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(tier, "LOOKUP_SECONDS", 0.5)
    asked = prompts(6, seed=3)
    with tiny.open(pool, num_gpu_blocks_override=40) as llm:
        for prompt in asked:
            tiny.ask(llm, prompt)
        pool.freeze()
        started = time.monotonic()
        assert [tiny.ask(llm, prompt) for prompt in asked] == [0] * 6
        assert time.monotonic() - started < 20
        pool.thaw()
        until(lambda: available(llm))
        for prompt in asked:
            tiny.ask(llm, prompt)
        assert sum(tiny.ask(llm, prompt) for prompt in asked) > 3 * WHOLE


def test_two_models_in_one_full_pool(tiny: Tiny, tmp_path: Path) -> None:
    """Two models, one with windows, share a pool that holds a few prompts of each; their blocks differ in size."""
    other = Tiny(tmp_path, "gpt_oss", seed=7)
    asked = prompts(5, seed=4)
    with PoolProcess(1 << 20) as pool, tiny.open(pool, num_gpu_blocks_override=40) as one, \
            other.open(pool, num_gpu_blocks_override=80) as two:
        assert one.plan.slot_bytes != two.plan.slot_bytes
        came = 0
        for prompt in [*asked, *asked[::-1]]:
            came += tiny.ask(one, prompt) + other.ask(two, prompt)
        held = pool.report()
        assert held.used <= held.capacity <= 1 << 20
        assert came > 0
        assert sum(model.evictions for model in held.models) > 0, "the pool was not full"


def test_pool_disk_and_host_memory_together(tiny: Tiny, pool: PoolProcess, tmp_path: Path) -> None:
    asked = prompts(4, seed=5)
    with tiny.open(pool, disk=(f"{tmp_path / 'kv'}:20MB",), host_memory="100kB") as llm:
        for prompt in asked:
            tiny.ask(llm, prompt)
    pool.kill()
    pool.start()
    with tiny.open(pool, disk=(f"{tmp_path / 'kv'}:20MB",)) as llm:  # from the disk, and thereby into the new pool
        assert [tiny.ask(llm, prompt) for prompt in asked] == [0] * 4
        assert llm.engine.scheduler.connector.reports()[-1].hit_tokens == 4 * WHOLE
    with tiny.open(pool) as llm:
        assert [tiny.ask(llm, prompt) for prompt in asked] == [WHOLE] * 4


def test_an_engine_without_an_owner_says_so_and_works(tiny: Tiny, pool: PoolProcess) -> None:
    pool.kill()
    (prompt,) = prompts(1, seed=6)
    with tiny.open(pool) as llm:
        (planned,) = llm.plan.tiers
        assert "no process serves it" in planned.note
        assert tiny.ask(llm, prompt) == 0
    with PoolProcess(1 << 16) as small, pytest.raises(SpilloverError, match=r"--host-pool .* holds no KV block"):
        tiny.open(small, block_size=64)
