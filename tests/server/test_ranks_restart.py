"""A server whose ranks are killed returns errors to clients, restarts all ranks, and gives the same tokens again."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import psutil
import pytest

from spillover import AsyncLLM, SamplingParams
from spillover.server.engine.engine_keeper import EngineDead
from support.models.hf_reference import greedy, save_checkpoint, tiny_model

DEADLINE = 120.0  # seconds for an engine to become ready again
TOLD_SECONDS = 5.0
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


async def until_restarted(llm: AsyncLLM, times: int) -> None:
    deadline = time.monotonic() + DEADLINE
    while not (llm.ready and llm.info.restarts == times):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def tokens(llm: AsyncLLM, params: SamplingParams) -> list[int]:
    last = [output async for output in llm.generate([5, 6, 7], params)][-1]
    return list(last.outputs[0].token_ids)


def ranks_of(llm: AsyncLLM) -> list[psutil.Process]:
    return [child for child in psutil.Process(llm.info.pid).children()
            if any("rank_process" in word for word in child.cmdline())]


@pytest.mark.alone  # the loss of a rank must be reported within seconds
def test_a_server_starts_its_ranks_again(tmp_path: Path) -> None:
    model, _ = tiny_model("llama", seed=3)
    folder = str(save_checkpoint(model, tmp_path))
    expected = greedy(model, [5, 6, 7], 8)

    async def run() -> None:
        async with AsyncLLM(folder, tensor_parallel_size=2, skip_tokenizer_init=True, block_size=8, max_model_len=256,
                            num_gpu_blocks_override=100) as llm:
            assert await tokens(llm, SHORT) == expected
            outputs = llm.generate([5, 6, 7], LONG)
            await anext(outputs)
            (rank,) = ranks_of(llm)
            rank.kill()
            struck = time.monotonic()
            with pytest.raises(EngineDead, match="before the request was done"):
                async for _ in outputs:
                    pass
            assert time.monotonic() - struck < TOLD_SECONDS
            await until_restarted(llm, 1)
            assert await tokens(llm, SHORT) == expected
            (rank,) = ranks_of(llm)
            rank.kill()  # while no request is running
            await until_restarted(llm, 2)
            assert await tokens(llm, SHORT) == expected
            left = [llm.info.pid, *(child.pid for child in ranks_of(llm))]
        assert not any(psutil.pid_exists(pid) for pid in left)

    asyncio.run(run())
