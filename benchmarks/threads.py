"""Many concurrent callers of one `LLM` (threads) and of one `AsyncLLM` (tasks), which stop reading at random.

    python benchmarks/threads.py --output-json benchmarks/results/threads.json
    python benchmarks/threads.py --threads 8 --requests 200 --load-format null

These conditions must hold: every answer has the tokens of the same request alone, or the first of them if its caller
left early (by closing the iterator, by an exception, by `abort`, by cancellation); afterwards no request runs or waits
and no KV block is held; and closing the engine while requests run gives every caller an error that says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spillover import LLM, AsyncLLM, RequestOutput, SamplingParams, SpilloverError

KINDS = 60  # number of different requests, from which callers choose
LEAVE_SECONDS = 30.0  # maximum time until abandoned requests have ended


class AbandonedError(Exception):
    """Raised by a caller while it reads its own answer."""


@dataclass(frozen=True)
class Case:
    """A request, and the tokens of its sequences when it runs alone."""

    prompt: list[int]
    params: SamplingParams
    expected: list[list[int]]

    def check(self, output: RequestOutput, complete: bool) -> None:
        found = tokens(output)
        expected = self.expected if complete else [
            alone[:len(some)] for alone, some in zip(self.expected, found, strict=True)]
        assert found == expected, f"{self.prompt} gave {found} and alone {expected}"


def tokens(output: RequestOutput) -> list[list[int]]:
    return [each.token_ids for each in output.outputs]


def make_cases(llm: LLM, seed: int, vocab_size: int, most_tokens: int = 16) -> list[Case]:
    """Make prompts that share beginnings, greedy and sampled, with one or two sequences; run each of them alone."""
    rng = random.Random(seed)
    start = [rng.randrange(3, vocab_size) for _ in range(24)]
    made = []
    for _ in range(KINDS):
        prompt = start[:rng.choice([0, 8, 17, 24])] + [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 12))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8]), seed=rng.randrange(1000), n=rng.choice([1, 1, 1, 2]),
            max_tokens=rng.randint(1, most_tokens), ignore_eos=rng.random() < 0.5,
            repetition_penalty=rng.choice([1.0, 1.1]))
        made.append(Case(prompt, params, tokens(llm.generate([prompt], params, use_tqdm=False)[0])))
    llm.reset_prefix_cache()
    return made


def drive_threads(llm: LLM, cases: list[Case], threads: int, requests: int, seed: int = 0) -> Counter[str]:
    """Return the number of requests by how their callers read them; raise AssertionError at the first wrong answer."""

    def whole(rng: random.Random) -> int:
        some = rng.sample(cases, rng.randint(1, 3))
        outputs = llm.generate([case.prompt for case in some], [case.params for case in some], use_tqdm=False)
        for case, output in zip(some, outputs, strict=True):
            case.check(output, complete=True)
        return len(some)

    def streamed(rng: random.Random) -> int:
        case = rng.choice(cases)
        for output in llm.stream(case.prompt, case.params):
            case.check(output, output.finished)
        return 1

    def left(rng: random.Random) -> int:
        case = rng.choice(cases)
        with closing(llm.stream(case.prompt, case.params)) as stream:  # type: ignore[type-var]
            for output, _ in zip(stream, range(rng.randint(0, 3)), strict=False):
                case.check(output, output.finished)
        return 1

    def failed(rng: random.Random) -> int:
        case = rng.choice(cases)
        with suppress(AbandonedError):
            for _ in llm.stream(case.prompt, case.params):
                raise AbandonedError
        return 1

    def looked(rng: random.Random) -> int:
        cache = llm.stats().cache
        assert cache.free + cache.evictable + cache.protected + cache.in_flight == cache.total
        if rng.random() < 0.1:
            llm.reset_prefix_cache()
        return 0

    def work(index: int) -> Counter[str]:
        rng, done = random.Random(f"{seed} {index}"), Counter[str]()
        while done.total() < -(-requests // threads):
            what: Callable[[random.Random], int] = rng.choices([whole, streamed, left, failed, looked],
                                                               [4, 4, 3, 1, 1])[0]
            done[what.__name__] += what(rng)
        return done

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, range(threads)), Counter())


async def drive_tasks(llm: AsyncLLM, cases: list[Case], tasks: int, requests: int, seed: int = 0) -> Counter[str]:
    """Do the same as `drive_threads`, with tasks of an event loop."""

    async def streamed(rng: random.Random, name: str) -> None:
        case = rng.choice(cases)
        async for output in llm.generate(case.prompt, case.params, name):
            case.check(output, output.finished)

    async def left(rng: random.Random, name: str) -> None:
        case, looks = rng.choice(cases), rng.randint(0, 3)
        async with aclosing(llm.generate(case.prompt, case.params, name)) as outputs:
            async for output in outputs:
                case.check(output, output.finished)
                looks -= 1
                if looks < 0:
                    break

    async def aborted(rng: random.Random, name: str) -> None:
        case, last = rng.choice(cases), None
        asyncio.get_running_loop().call_later(rng.random() * 0.05, lambda: asyncio.ensure_future(llm.abort(name)))
        async for last in llm.generate(case.prompt, case.params, name):
            case.check(last, complete=False)
        assert last is not None
        assert last.finished

    async def cancelled(rng: random.Random, name: str) -> None:
        task = asyncio.ensure_future(streamed(rng, name))
        await asyncio.wait([task], timeout=rng.random() * 0.05)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def work(index: int) -> Counter[str]:
        rng, done = random.Random(f"{seed} {index}"), Counter[str]()
        while done.total() < -(-requests // tasks):
            what = rng.choices([streamed, left, aborted, cancelled], [6, 3, 2, 1])[0]
            await what(rng, f"{index}-{done.total()}")
            done[what.__name__] += 1
        return done

    return sum(await asyncio.gather(*map(work, range(tasks))), Counter())


def check_nothing_is_left(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.cache.protected, stats.cache.in_flight) == (0, 0, 0, 0), stats
    llm.engine.scheduler.check()


async def check_nothing_is_left_async(llm: AsyncLLM) -> None:
    """Check that nothing is left, after the engine has processed the last abandoned requests."""
    assert llm.num_open == 0
    deadline = time.monotonic() + LEAVE_SECONDS
    while (stats := await llm.stats()).num_running + stats.num_waiting + stats.blocks_protected:
        assert time.monotonic() < deadline, stats


def close_in_the_middle(llm: LLM, threads: int) -> int:
    """Close the LLM while every thread requests long answers; return how many got an error that says so: all must."""
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

    def ask(index: int) -> int:
        try:
            while True:
                if index % 2:
                    llm.generate([[5, 6, 7], [8, 9]], params, use_tqdm=False)
                else:
                    list(llm.stream([5, 6, 7], params))
        except SpilloverError as error:
            return int("the LLM was closed" in str(error))

    with ThreadPoolExecutor(threads + 1) as pool:
        asking = [pool.submit(ask, index) for index in range(threads)]
        while llm.stats().num_running == 0:
            time.sleep(0.01)
        pool.submit(llm.close).result()
        return sum(each.result() for each in asking)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--threads", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-json", type=Path)
    options = parser.parse_args()
    flags: dict[str, Any] = {"model": options.model, "load_format": options.load_format, "max_model_len": 512,
                             "max_num_seqs": 32, "num_gpu_blocks_override": 48}  # few blocks: requests are preempted
    print(f"One by one, then {options.requests:,} requests in {options.threads} threads")
    with LLM(**flags) as llm:
        vocab_size = llm._parts.model_config.vocab_size
        cases = make_cases(llm, options.seed, vocab_size)
        start = time.perf_counter()
        by_threads = drive_threads(llm, cases, options.threads, options.requests, options.seed)
        thread_seconds = time.perf_counter() - start
        check_nothing_is_left(llm)
        preemptions = llm.stats().preemptions
        closed = close_in_the_middle(llm, options.threads)
        assert closed == options.threads
    print(f"{thread_seconds:.1f} s, {dict(by_threads)}, {preemptions} preemptions; {closed} callers were told of the "
          "close")

    async def in_tasks() -> tuple[Counter[str], float]:
        async with AsyncLLM(**flags) as llm:
            start = time.perf_counter()
            done = await drive_tasks(llm, cases, options.threads, options.requests, options.seed)
            seconds = time.perf_counter() - start
            await check_nothing_is_left_async(llm)
            return done, seconds

    print(f"{options.requests:,} requests in {options.threads} tasks")
    by_tasks, task_seconds = asyncio.run(in_tasks())
    print(f"{task_seconds:.1f} s, {dict(by_tasks)}")
    if options.output_json is not None:
        from made_by import made_by

        options.output_json.write_text(json.dumps({
            **made_by(), "model": options.model or "SmolLM2-135M-Instruct", "load_format": options.load_format,
            "threads": options.threads, "seed": options.seed,
            "LLM": {"requests": by_threads.total(), "seconds": round(thread_seconds, 1), "ended": dict(by_threads),
                    "preemptions": preemptions, "told_of_the_close": closed, "wrong": 0, "left_open": 0},
            "AsyncLLM": {"requests": by_tasks.total(), "seconds": round(task_seconds, 1), "ended": dict(by_tasks),
                         "wrong": 0, "left_open": 0},
        }, indent=2) + "\n")


if __name__ == "__main__":
    main()
