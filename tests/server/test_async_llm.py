"""`AsyncLLM` from many tasks: tokens as one by one, no leaks when callers leave, an error if the engine dies."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest
from threads import check_nothing_is_left_async, drive_tasks, make_cases

from spillover import LLM, AsyncLLM, SamplingParams
from spillover.errors import EngineDead, RequestError, SpilloverError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "max_position_embeddings": 256, "tie_word_embeddings": False, "hidden_act": "silu",
    "eos_token_id": 2, "torch_dtype": "float32",
}
FLAGS: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 16, "block_size": 8,
                         "max_num_batched_tokens": 64, "num_gpu_blocks_override": 40, "max_model_len": 256}
LONG = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(LLAMA))
    return str(path)


def test_64_tasks_with_random_aborts_and_deaths_get_the_tokens_of_one_by_one(folder: str) -> None:
    with LLM(folder, **FLAGS) as alone:
        cases = make_cases(alone, 0, LLAMA["vocab_size"])

    async def use() -> None:
        async with AsyncLLM(folder, **FLAGS) as llm:
            done = await drive_tasks(llm, cases, tasks=64, requests=2000)
            assert done.total() >= 2000
            assert min(done.values()) > 50
            await check_nothing_is_left_async(llm)
            await one_dies(llm)
            await others(llm)
        with pytest.raises(EngineDead, match="the engine is stopping"):
            await anext(llm.generate([1]))
        with pytest.raises(EngineDead):
            await llm.stats()

    async def one_dies(llm: AsyncLLM) -> None:
        """Waiting calls get an error; calls after the restart are served."""
        rng, killed = random.Random(1), asyncio.Event()

        async def ask(seed: int) -> int:
            deaths, served_after = 0, 0
            while served_after < 3:
                case = random.Random(seed + served_after).choice(cases)
                try:
                    async for output in llm.generate(case.prompt, case.params):
                        case.check(output, output.finished)
                    served_after += killed.is_set() and llm.ready
                except EngineDead:
                    deaths += 1
                    await asyncio.sleep(0.05)
            return deaths

        asking = [asyncio.ensure_future(ask(rng.randrange(10**6))) for _ in range(32)]
        waiting = [asyncio.ensure_future(anext(llm.generate([seed, 1], LONG))) for seed in range(3, 40)]
        await asyncio.sleep(0)
        while not llm.latest_stats().num_running:
            await asyncio.sleep(0.01)
        first = llm.info.pid
        os.kill(first, signal.SIGKILL)
        killed.set()
        assert sum(await asyncio.gather(*asking)) > 0
        results = await asyncio.gather(*waiting, return_exceptions=True)
        told = [str(result) for result in results if isinstance(result, BaseException)]
        assert told
        assert all("killed by SIGKILL" in sentence and "before the request was done" in sentence for sentence in told)
        assert llm.info.pid != first
        assert llm.info.restarts == 1
        await check_nothing_is_left_async(llm)

    async def others(llm: AsyncLLM) -> None:
        """Check the calls other than generate."""
        async with aclosing(llm.generate([5, 6], LONG, "mine")) as outputs:
            await anext(outputs)
            with pytest.raises(RequestError, match="the id 'mine' runs already"):
                await anext(llm.generate([7], LONG, "mine"))
            await llm.abort("nobody's")
            await llm.abort("mine")
            last = [output async for output in outputs][-1]
            assert last.finished
            assert last.request_id == "mine"
            assert last.outputs[0].finish_reason == "abort"
        await llm.sleep()
        waiting = asyncio.ensure_future(anext(llm.generate([5, 6], LONG)))
        await asyncio.sleep(0.05)
        assert llm.is_sleeping
        assert not waiting.done()
        await llm.wake_up()
        assert len((await waiting).outputs[0].token_ids) > 0
        await llm.reset_prefix_cache()
        assert (await llm.stats()).blocks_evictable == 0
        with pytest.raises(RequestError, match="chat needs a tokenizer"):
            await anext(llm.chat([{"role": "user", "content": "Hello"}]))

    asyncio.run(asyncio.wait_for(use(), 300))


WRONG: list[tuple[Callable[[AsyncLLM], Any], str]] = [
    (lambda llm: llm.generate(5), "a prompt is a string, a list of token ids"),
    (lambda llm: llm.generate(None), "a prompt is a string, a list of token ids"),
    (lambda llm: llm.generate([1], {"temperature": 0}), "sampling_params is a SamplingParams"),
    (lambda llm: llm.chat("hello"), "a conversation is a list of messages"),
    (lambda llm: anext(llm.generate([1])), "is not started"),
    (lambda llm: llm.stats(), "is not started"),
]


@pytest.mark.parametrize(("use", "words"), WRONG)
def test_what_cannot_be_is_said_in_a_sentence(use: Callable[[AsyncLLM], Any], words: str) -> None:
    async def try_it() -> None:
        found = use(AsyncLLM(load_format="null"))
        if isinstance(found, Coroutine) or hasattr(found, "__await__"):
            await found

    with pytest.raises(SpilloverError, match=words):
        asyncio.run(try_it())


def test_it_does_without_torch() -> None:
    """AsyncLLM starts at once and stays small in a notebook or server: only the engine process loads torch."""
    code = "import sys; from spillover import AsyncLLM; AsyncLLM(max_num_seqs=4); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
