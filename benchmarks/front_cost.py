"""CPU and wall-clock time of a streamed token in the HTTP front, which is everything but the model.

    python benchmarks/front_cost.py --concurrency 1,16,64 --output-json results.json

Starts `spill serve --load-format null` (instant steps, no weights) and streams completions from it over plain sockets,
as an ordinary HTTP client would cost more than the server. The client shares the machine's cores with the server. CPU
time is read per process, so that the cost per token does not depend on which process waited for which. A chunk is one
server-sent event; the front puts the tokens of several steps into one chunk if it falls behind the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

START_SECONDS = 120.0
END_OF_BODY = b"0\r\n\r\n"  # end of a chunked response


@dataclass(frozen=True)
class Row:
    concurrency: int
    requests: int
    tokens: int
    chunks: int
    seconds: float
    front_cpu: float  # CPU seconds, as the next two
    engine_cpu: float
    client_cpu: float
    first_chunk_ms: float  # median over requests

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "tokens_per_second": self.tokens_per_second,
            "chunks_per_second": self.chunks / self.seconds,
            "front_us_per_token": 1e6 * self.front_cpu / self.tokens,
            "engine_us_per_token": 1e6 * self.engine_cpu / self.tokens,
            "wall_us_per_token": 1e6 * self.seconds / self.tokens,
        }


@dataclass(frozen=True)
class Streamed:
    tokens: int
    chunks: int
    first_chunk: float  # seconds from sending to the first text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model whose tokenizer and vocabulary are used; default: the default model")
    parser.add_argument("--concurrency", default="1,16,64", help="numbers of concurrent streams, separated by commas")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per request")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each concurrency")
    parser.add_argument("--chat", action="store_true", help="/v1/chat/completions instead of /v1/completions")
    parser.add_argument("--output-json", type=Path)
    options = parser.parse_args()
    rows = []
    pydantic_us = pydantic_chunk_us()
    with served(options.model) as (port, front, engine):
        asyncio.run(measure(port, front, engine, 4, 1.0, options.tokens, options.chat))  # warm-up
        print(f"{'streams':>8}{'tok/s':>10}{'chunks/s':>10}{'us/tok':>9}{'front CPU s/1k':>16}{'engine CPU s/1k':>17}"
              f"{'client CPU s/1k':>17}{'first chunk ms':>16}")
        for concurrency in (int(each) for each in options.concurrency.split(",")):
            row = asyncio.run(measure(port, front, engine, concurrency, options.seconds, options.tokens, options.chat))
            rows.append(row)
            thousands = row.tokens / 1000
            print(f"{row.concurrency:8}{row.tokens_per_second:10,.0f}{row.chunks / row.seconds:10,.0f}"
                  f"{1e6 * row.seconds / row.tokens:9.1f}{row.front_cpu / thousands:16.3f}"
                  f"{row.engine_cpu / thousands:17.3f}{row.client_cpu / thousands:17.3f}{row.first_chunk_ms:16.2f}")
    print(f"A chunk made as vLLM makes one, a pydantic model dumped to JSON, takes {pydantic_us:.1f} us of CPU time in "
          f"this Python before anything is sent; front CPU s/1k above is ms per token for all work of the front.")
    if options.output_json is not None:
        from made_by import made_by

        result = {"null_model": True, "pydantic_chunk_us": pydantic_us,
                  "results": [row.as_dict() for row in rows], **made_by()}
        options.output_json.write_text(json.dumps(result, indent=2) + "\n")


@contextmanager
def served(model: str | None) -> Iterator[tuple[int, psutil.Process, psutil.Process]]:
    """Start a server; yield its port, its front process and its engine process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("spill")), "serve", *([model] if model else []),
               "--load-format", "null", "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            if not asyncio.run(is_healthy(port, process)):
                log.seek(0)
                sys.exit(f"the server did not become healthy:\n{log.read().decode()}")
            front = psutil.Process(process.pid)
            engine = next(child for child in front.children() if "engine_process" in " ".join(child.cmdline()))
            yield port, front, engine
        finally:
            process.terminate()
            process.wait(timeout=30)


async def is_healthy(port: int, process: subprocess.Popen[bytes]) -> bool:
    """Wait until the server is healthy; return False if it exits or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            status = await reader.readline()
            writer.close()
            if b" 200 " in status:
                return True
        except OSError:
            pass
        await asyncio.sleep(0.1)
    return False


async def measure(port: int, front: psutil.Process, engine: psutil.Process, concurrency: int, seconds: float,
                  tokens: int, chat: bool) -> Row:
    """Run streams that send one request after the other for `seconds`; requests in progress then are completed."""
    client = psutil.Process()
    before = [cpu_seconds(each) for each in (front, engine, client)]
    start = time.perf_counter()
    streams = [stream(port, index, start + seconds, tokens, chat) for index in range(concurrency)]
    done = [each for one in await asyncio.gather(*streams) for each in one]
    elapsed = time.perf_counter() - start
    front_cpu, engine_cpu, client_cpu = (
        cpu_seconds(each) - earlier for each, earlier in zip((front, engine, client), before, strict=True))
    waits = sorted(each.first_chunk for each in done)
    return Row(concurrency, len(done), sum(each.tokens for each in done), sum(each.chunks for each in done), elapsed,
               front_cpu, engine_cpu, client_cpu, 1e3 * waits[len(waits) // 2])


async def stream(port: int, index: int, end: float, tokens: int, chat: bool) -> list[Streamed]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    done = []
    while time.perf_counter() < end:
        writer.write(request(index * 1000 + len(done), tokens, chat))
        sent = time.perf_counter()
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            sys.exit(f"the server answered {head.decode()}")
        first = 0.0
        body = bytearray()
        while not body.endswith(END_OF_BODY):
            body += await reader.read(1 << 16)
            first = first or time.perf_counter() - sent
        done.append(Streamed(usage(body), body.count(b"data: {") - 1, first))  # the last chunk is the usage
    writer.close()
    return done


def request(serial: int, tokens: int, chat: bool) -> bytes:
    fields: dict[str, Any] = {"model": "default", "max_tokens": tokens, "ignore_eos": True, "stream": True,
                              "stream_options": {"include_usage": True}}
    if chat:
        fields["messages"] = [{"role": "user", "content": f"Count to {serial}."}]
    else:
        fields["prompt"] = f"Count to {serial}:"
    body = json.dumps(fields).encode()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    head = (f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n")
    return head.encode() + body


def usage(body: bytearray) -> int:
    """Return the number of output tokens that the server reported."""
    last = body[body.rindex(b'"completion_tokens"'):]
    return int(bytes(last).split(b":", 1)[1].split(b",", 1)[0].strip(b" }"))


def pydantic_chunk_us(count: int = 5000) -> float:
    """Return the CPU microseconds of making a chunk as is common, for comparison: pydantic models that are dumped."""
    from pydantic import BaseModel, Field

    class Choice(BaseModel):
        index: int
        text: str
        logprobs: dict[str, Any] | None = None
        finish_reason: str | None = None
        stop_reason: int | str | None = None
        prompt_token_ids: list[int] | None = None
        token_ids: list[int] | None = None

    class Chunk(BaseModel):
        id: str
        object: str = "text_completion"
        created: int = Field(default_factory=lambda: int(time.time()))
        model: str
        choices: list[Choice]
        usage: dict[str, Any] | None = Field(default=None)

    start = time.process_time()
    for index in range(count):
        chunk = Chunk(id="cmpl-0123456789abcdef", model="default", choices=[Choice(index=0, text=f" word{index}")])
        f"data: {chunk.model_dump_json(exclude_unset=False)}\n\n"
    return 1e6 * (time.process_time() - start) / count


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
