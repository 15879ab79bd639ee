"""Half an hour of faults under load, checked against known answers: none may be wrong or late, nothing may leak.

    python benchmarks/chaos.py --minutes 30 --requests-at-least 5000 --output-json benchmarks/results/chaos.json
    python benchmarks/chaos.py --minutes 3 --seed 7          # a shorter run; the same seed makes the same faults

A clean server first answers every prompt, greedily. Then a server whose pool is far too small for the load, with host
memory, a disk and a Redis server below it, answers the same prompts while faults are made one after the other
(chaos_faults.py). A request that the server asks to retry (429, 503, an error in its stream) is sent again until its
deadline.
These conditions must hold: every answer is the known one and arrives by its deadline, the server never closes a
connection without an answer or an error, and afterwards no block, process, file, shared memory or descriptor is left
and memory has not grown. The exit code is 1 if one does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_faults import Faults, Redis, SmallDisk
from chaos_leaks import Leaks
from server_process import HOST, ServerProcess

from spillover.bench.serving.http_client import Call, Connection
from spillover.bench.serving.sse import events

DOCUMENTS, QUESTIONS = 24, 6
DOCUMENT_WORDS = (40, 120)
OUTPUT_TOKENS = (2, 10)
BLOCKS = 80  # device blocks of 16 tokens: about a third of what the load needs at once
HOST_MEMORY, DISK, DISK_FREE, REMOTE = "32MB", "120MB", "144m", "200MB"
WORDS = ["river", "stone", "winter", "engine", "letter", "garden", "silver", "morning", "bridge", "forest", "window",
         "market", "island", "paper", "thunder", "candle", "harbour", "mountain", "copper", "village", "ribbon"]


@dataclass(frozen=True)
class Prompt:
    text: str
    max_tokens: int
    answer: str = ""


@dataclass
class Counts:
    """What clients observed; `problems` must stay empty."""

    answers: int = 0
    wrong: int = 0
    late: int = 0  # requests without an answer at their deadline
    retries: Counter[str] = field(default_factory=Counter)  # answers that asked for a retry, and failed hang-ups
    hang_ups: int = 0  # clients that disconnected in the middle of a stream
    slowest: float = 0.0
    problems: list[str] = field(default_factory=list)


class RetryError(Exception):
    """An answer or event that asks the client to retry later."""


def make_prompts(seed: int) -> list[Prompt]:
    """Make prompts of documents that several questions share, so that caching prefixes pays off."""
    rng = random.Random(seed)
    prompts = []
    for _ in range(DOCUMENTS):
        document = " ".join(rng.choice(WORDS) for _ in range(rng.randint(*DOCUMENT_WORDS)))
        for _ in range(QUESTIONS):
            question = " ".join(rng.choice(WORDS) for _ in range(8))
            prompts.append(Prompt(f"{document}\nQuestion: {question}?\nAnswer:", rng.randint(*OUTPUT_TOKENS)))
    return prompts


class Load:
    """Clients that send prompts until `stopped` is set; each request has a deadline."""

    def __init__(self, server: ServerProcess, prompts: list[Prompt], seed: int, deadline: float) -> None:
        self.counts = Counts()
        self.stopped = False
        self._server, self._prompts, self._deadline = server, prompts, deadline
        self._rng = random.Random(seed)

    async def run(self, clients: int) -> None:
        await asyncio.gather(*(self._client() for _ in range(clients)))

    async def burst(self, count: int) -> None:
        """Send `count` requests at once, each on a separate connection."""

        async def one() -> None:
            connection = Connection(HOST, self._server.port)
            await self._send_until_answered(connection, self._rng.choice(self._prompts))
            await connection.close()

        await asyncio.gather(*(one() for _ in range(count)))

    async def disconnect(self, count: int) -> None:
        """Start `count` streams and disconnect in the middle of them."""

        async def one(prompt: Prompt, pieces: int) -> None:
            connection = Connection(HOST, self._server.port)
            try:
                async with asyncio.timeout(self._deadline):
                    reply = await connection.send(self._call(dataclasses.replace(prompt, max_tokens=200), stream=True))
                    if reply.is_stream:
                        async for _ in connection.chunks(reply):
                            pieces -= 1
                            if pieces <= 0:
                                break
                self.counts.hang_ups += 1
            except (OSError, EOFError, ValueError) as error:
                self.counts.retries[f"while leaving: {type(error).__name__}"] += 1
            except TimeoutError:
                self.counts.late += 1
                self.counts.problems.append("a client that wanted to disconnect got no answer in time")
            finally:
                await connection.close()

        await asyncio.gather(*(one(self._rng.choice(self._prompts), self._rng.randrange(1, 6)) for _ in range(count)))

    async def _client(self) -> None:
        connection = Connection(HOST, self._server.port)
        while not self.stopped:
            await self._send_until_answered(connection, self._rng.choice(self._prompts))
        await connection.close()

    async def _send_until_answered(self, connection: Connection, prompt: Prompt) -> None:
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._deadline):
                while True:
                    try:
                        text = await self._complete(connection, prompt)
                        break
                    except RetryError as error:
                        self.counts.retries[str(error)] += 1
                        await asyncio.sleep(0.2 + self._rng.random() / 2)
        except TimeoutError:
            self.counts.late += 1
            self.counts.problems.append(f"no answer within {self._deadline:.0f} s to {prompt.text[:60]!r}")
            await connection.close()
            return
        except (OSError, EOFError, ValueError) as error:
            self.counts.problems.append(f"the connection closed without an answer or an error: {error!r}")
            await connection.close()
            return
        self.counts.answers += 1
        self.counts.slowest = max(self.counts.slowest, time.monotonic() - started)
        if prompt.answer and text != prompt.answer:
            self.counts.wrong += 1
            self.counts.problems.append(f"{prompt.text[:60]!r}: {text!r} instead of {prompt.answer!r}")

    async def _complete(self, connection: Connection, prompt: Prompt) -> str:
        stream = self._rng.random() < 0.5
        reply = await connection.send(self._call(prompt, stream))
        if reply.status != 200:
            body = await connection.read(reply)
            if reply.status in (429, 503):
                raise RetryError(str(reply.status))
            raise ValueError(f"status {reply.status}: {body[:200]!r}")
        if not reply.is_stream:
            return str(json.loads(await connection.read(reply))["choices"][0]["text"])
        text, finished = "", False
        async for data in events(connection.chunks(reply)):
            if data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise RetryError("error in a stream")
            text += event["choices"][0]["text"]
            finished |= event["choices"][0].get("finish_reason") is not None
        if not finished:
            raise ValueError("the stream ended before its answer was complete")
        return text

    @staticmethod
    def _call(prompt: Prompt, stream: bool) -> Call:
        body = {"model": "default", "prompt": prompt.text, "max_tokens": prompt.max_tokens, "temperature": 0,
                "ignore_eos": True, "stream": stream}
        return Call("POST", "/v1/completions", json.dumps(body).encode())


async def known_answers(server: ServerProcess, prompts: list[Prompt]) -> list[Prompt]:
    load = Load(server, prompts, 0, 600)
    connections = [Connection(HOST, server.port) for _ in range(8)]
    found: list[Prompt] = []

    async def some(connection: Connection, share: list[Prompt]) -> None:
        for prompt in share:
            found.append(dataclasses.replace(prompt, answer=await load._complete(connection, prompt)))
        await connection.close()

    await asyncio.gather(*(some(connection, prompts[i::8]) for i, connection in enumerate(connections)))
    return found


async def chaos(server: ServerProcess, load: Load, faults: Faults, leaks: Leaks, seconds: float, clients: int) -> None:
    start = time.monotonic()
    running = asyncio.ensure_future(load.run(clients))
    breaking = asyncio.ensure_future(faults.run(start + seconds))
    while not breaking.done():
        await asyncio.wait((breaking, running), timeout=5, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            breaking.cancel()
            running.result()
        leaks.sample_memory((time.monotonic() - start) / seconds)
        passed = time.monotonic() - start
        left = max(0, round(seconds - passed))
        counts = load.counts
        print(f"\r{left // 60:d}:{left % 60:02d} left, {counts.answers:,} answers ({counts.answers / passed:.1f} per "
              f"second), {counts.wrong} wrong, {counts.late} late, {len(counts.problems)} problems; {faults.now:<24}",
              end="", file=sys.stderr, flush=True)
    breaking.result()
    load.stopped = True
    await running
    print(file=sys.stderr)
    load.counts.problems += await leaks.after_load(faults.engine_alive)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds of one request, with all retries")
    parser.add_argument("--pause", type=float, default=4.0, help="seconds on average between two faults")
    parser.add_argument("--requests-at-least", type=int, default=0, help="fail if fewer were answered")
    parser.add_argument("--faults", default=None, help="faults to make, separated by commas; default: all")
    parser.add_argument("--output-json", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # stops servers, removes files
    prompts = make_prompts(options.seed)
    scratch = Path(tempfile.mkdtemp(prefix="chaos-"))
    common = ("--max-model-len", "1024")
    try:
        print(f"Answers of a clean server to {len(prompts)} prompts ...", file=sys.stderr)
        with ServerProcess(*common) as clean:
            prompts = asyncio.run(known_answers(clean, prompts))
        (scratch / "tmp").mkdir()
        with Redis(scratch) as redis, SmallDisk(scratch / "disk", DISK_FREE) as disk:
            server = ServerProcess(
                *common, "--num-gpu-blocks-override", str(BLOCKS), "--host-memory", HOST_MEMORY,
                "--disk", f"{disk.path}/kv:{DISK}", "--remote", f"{redis.url}?size={REMOTE}", "--max-num-seqs", "16",
                environment={"TMPDIR": str(scratch / "tmp")})
            with server:
                load = Load(server, prompts, options.seed, options.deadline)
                leaks = Leaks(server, scratch / "tmp")
                faults = Faults(server, redis, disk, load, random.Random(options.seed), options.pause,
                                options.faults.split(",") if options.faults else None)
                asyncio.run(chaos(server, load, faults, leaks, options.minutes * 60, options.clients))
                log = server.log
            load.counts.problems += leaks.after_stop()
            if (found := log.find("Traceback")) >= 0:
                load.counts.problems.append(f"the server's log has a traceback:\n{log[found:found + 3000]}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return report(options, load.counts, faults, leaks)


def report(options: argparse.Namespace, counts: Counts, faults: Faults, leaks: Leaks) -> int:
    if counts.answers < options.requests_at_least:
        counts.problems.append(f"{counts.answers} answers, and at least {options.requests_at_least} are required")
    result: dict[str, Any] = {
        "minutes": options.minutes, "seed": options.seed, "clients": options.clients, "deadline": options.deadline,
        "answers": counts.answers, "wrong": counts.wrong, "late": counts.late, "left": counts.hang_ups,
        "told": dict(counts.retries.most_common()), "slowest_seconds": round(counts.slowest, 1),
        "faults": dict(faults.made.most_common()), "not_possible_here": sorted(faults.impossible),
        "memory_mb": leaks.memory, "problems": counts.problems,
    }
    shown = {name: value for name, value in result.items() if name not in ("problems", "memory_mb")}
    print(json.dumps(shown, indent=2))
    for problem in counts.problems[:40]:
        print(f"PROBLEM {problem}", file=sys.stderr)
    print(f"{len(counts.problems)} problems")
    if options.output_json is not None:
        from made_by import made_by

        options.output_json.write_text(json.dumps(made_by() | result, indent=2) + "\n")
    return 1 if counts.problems else 0


if __name__ == "__main__":
    sys.exit(main())
