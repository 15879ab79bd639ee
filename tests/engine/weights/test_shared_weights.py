"""Engines whose weights do not fit keep one copy in a shared pool, and give the tokens of a single engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spillover import LLM, SamplingParams
from spillover.engine.weights.placed import PlacedWeights
from support import starved
from support.pool_process import PoolProcess

FLAGS: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 4, "max_num_batched_tokens": 64,
                         "load_format": "dummy", "skip_tokenizer_init": True}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def pool() -> Iterator[PoolProcess]:
    with PoolProcess(256 << 20) as process:
        yield process


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(starved.prompts(3), PARAMS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def shared_and_own(llm: LLM) -> tuple[int, int, int]:
    """Return the bytes of weights in the pool, of those found there, and of those in the engine's own host memory."""
    weights = llm.engine.runner.weights
    assert isinstance(weights, PlacedWeights)
    assert weights._shared is not None
    own = llm.engine.runner.transfers.pool.bytes_by_use.get("weights", 0)
    assert weights.host_bytes == weights._shared.nbytes + own
    return weights._shared.nbytes, weights._shared.found_bytes, own


@pytest.mark.parametrize(("name", "strategy"), [("llama", "sequential"), ("qwen3-moe", "experts"),
                                                ("gpt-oss", "demand"), ("qwen3-moe-fp8", "host-experts")])
def test_weights_lie_in_the_pool_once(pool: PoolProcess, tmp_path: Path, name: str, strategy: str) -> None:
    folder = starved.write_config(tmp_path, name)
    budget = starved.least(folder, weights=strategy)
    flags = {**FLAGS, "weights": strategy, "gpu_memory": str(budget + random.Random(name).randrange(1 << 20)),
             "host_pool": str(pool.path)}
    alone = starved.answer(folder, starved.prompts(3), tokens=8, weights=strategy, gpu_memory=flags["gpu_memory"])
    with LLM(folder, **flags) as one:
        nbytes, found, own = shared_and_own(one)
        assert (found, own) == (0, 0)
        assert nbytes == pytest.approx(alone.host_bytes, rel=0.01)
        assert pool.report().weights == nbytes
        with LLM(folder, **flags) as two:
            assert shared_and_own(two) == (nbytes, nbytes, 0)
            assert pool.report().weights == nbytes, "a second copy"
            assert tokens(two) == alone.tokens
        assert tokens(one) == alone.tokens
        pool.kill()  # mapped memory stays valid
        assert tokens(one) == alone.tokens


def test_an_engine_started_again_finds_them_and_others_make_room(pool: PoolProcess, tmp_path: Path) -> None:
    folder = starved.write_config(tmp_path, "llama")
    flags = {**FLAGS, "weights": "sequential", "gpu_memory": str(starved.least(folder, weights="sequential")),
             "host_pool": str(pool.path)}
    with LLM(folder, **flags) as llm:
        expected, (nbytes, _, _) = tokens(llm), shared_and_own(llm)
    assert pool.report().weights == nbytes
    with LLM(folder, **flags) as llm:
        assert shared_and_own(llm) == (nbytes, nbytes, 0)
        assert tokens(llm) == expected
    with LLM(folder, **{**flags, "seed": 5}) as llm:  # other weights: none of them is in the pool
        assert shared_and_own(llm) == (nbytes, 0, 0)
        assert tokens(llm) != expected


def test_a_pool_that_is_too_small_is_told_and_the_rest_is_the_engines_own(tmp_path: Path,
                                                                         caplog: pytest.LogCaptureFixture) -> None:
    folder = starved.write_config(tmp_path, "llama")
    gpu_memory = str(starved.least(folder, weights="sequential"))
    alone = starved.answer(folder, starved.prompts(3), tokens=8, weights="sequential", gpu_memory=gpu_memory)
    with PoolProcess(8 << 20) as pool, LLM(folder, **FLAGS, weights="sequential", gpu_memory=gpu_memory,
                                           host_pool=str(pool.path)) as llm:
        nbytes, found, own = shared_and_own(llm)
        assert 0 < nbytes < alone.host_bytes
        assert found == 0
        assert nbytes + own == pytest.approx(alone.host_bytes, rel=0.01)
        assert "kept in this engine's own memory" in caplog.text
        assert tokens(llm) == alone.tokens
