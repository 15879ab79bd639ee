"""An OpenAI server without a model, in its own process: it sends tokens at known times and logs when it sent them.

A request's `mock` field (or the command line, for all requests) sets its behaviour:

    ttft, itl       seconds to the first token, and between two chunks
    per_chunk       number of tokens in a chunk
    usage           in its "own" chunk, with the "last" one, in "each", or "none"
    shape           "plain"; "empty": an empty chunk before each; "silent": tokens without text; "crlf"; "cut": bytes
                    split in the middle of an event; "held": text that arrives after the last token
    fail_at, drop_at  index of the chunk replaced by an error event, or by a broken connection
    status          status of an HTTP error
    done            false: no [DONE]
    id              name of the request in the log

`slots` requests are served at once, the others wait; `noise` is the deviation of a request's speed; `speed` (or POST
/speed {"factor": x} later) multiplies all times: 1.05 is 5% slower. GET /log returns
(id, read, written times) of each request by the machine's monotonic clock, that of `time.perf_counter` in any process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

DEFAULTS: dict[str, Any] = {"ttft": 0.02, "itl": 0.005, "per_chunk": 1, "usage": "own", "shape": "plain",
                            "fail_at": None, "drop_at": None, "status": 200, "done": True, "noise": 0.0, "id": None}


class MockServer:
    """A mock server on a free port; it is stopped when the block is left."""

    def __init__(self, **settings: Any) -> None:
        self._arguments = [f"--{name}={value}" for name, value in settings.items()]

    def __enter__(self) -> MockServer:
        self._process = subprocess.Popen([sys.executable, str(Path(__file__).resolve()), *self._arguments],
                                         stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return json.loads(answer.read())

    def log(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self.get("/log")
        return entries


class _Server:
    def __init__(self, settings: argparse.Namespace) -> None:
        self._defaults = DEFAULTS | {name: getattr(settings, name) for name in ("ttft", "itl", "noise", "usage")}
        self._slots = asyncio.Semaphore(settings.slots) if settings.slots else contextlib.nullcontext()
        self._factor = settings.speed
        self._log: list[dict[str, Any]] = []
        self._random = random.Random(settings.seed)
        self._counts = {"prompt_tokens": 0, "generation_tokens": 0, "prefix_cache_queries": 0, "prefix_cache_hits": 0}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                method, path, _ = head.split(" ", 2)
                length = next((int(line.split(":")[1]) for line in head.split("\r\n")
                               if line.lower().startswith("content-length")), 0)
                body = json.loads(await reader.readexactly(length)) if length else {}
                if path.endswith("/completions"):
                    if not await self._generate(path, body, writer):
                        break
                else:
                    writer.write(_whole(*self._page(method, path, body)))
        writer.close()

    def _page(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, str, str]:
        if path == "/metrics":
            lines = [line for name, value in self._counts.items()
                     for line in (f"# TYPE mock:{name} counter", f'mock:{name}_total{{model_name="mock"}} {value}')]
            return 200, "text/plain", "\n".join([*lines, ""])
        if path == "/speed":
            self._factor = float(body["factor"])
        pages: dict[str, Any] = {
            "/health": {"status": "ok"}, "/version": {"version": "mock 1"}, "/log": self._log,
            "/v1/models": {"object": "list", "data": [{"id": "mock", "object": "model", "max_model_len": 8192}]},
            "/tokenize": {"tokens": [zlib.crc32(word.encode()) % 50_000 for word in body.get("prompt", "").split()],
                          "count": 0, "max_model_len": 8192},
            "/reset_prefix_cache": {}, "/speed": {}, "/start_profile": {}, "/stop_profile": {}}
        return (200, "application/json", json.dumps(pages[path])) if path in pages else (404, "text/plain", "no page")

    async def _generate(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Answer a request; return whether the connection stays open."""
        read = time.perf_counter()
        how = self._defaults | body.get("mock", {})
        prompt = body.get("prompt", body.get("messages"))
        prompt_tokens = len(prompt) if not isinstance(prompt, list) or not isinstance(prompt[0], dict) else sum(
            len(message["content"]) for message in prompt)
        entry: dict[str, Any] = {"id": how["id"], "read": read, "written": [], "prompt": prompt}
        self._log.append(entry)
        if how["status"] != 200:
            writer.write(_whole(how["status"], "application/json",
                                json.dumps({"error": {"message": "as asked", "type": "mock"}})))
            return True
        async with self._slots:
            speed = self._factor * (max(0.1, self._random.gauss(1.0, how["noise"])) if how["noise"] else 1.0)
            begun = read if isinstance(self._slots, contextlib.nullcontext) else time.perf_counter()
            kept = await self._stream(_Answer(path, body, how, prompt_tokens), how, begun, speed, entry, writer)
        self._counts["prompt_tokens"] += prompt_tokens
        self._counts["prefix_cache_queries"] += prompt_tokens
        self._counts["generation_tokens"] += body.get("max_tokens") or body.get("max_completion_tokens") or 16
        return kept

    async def _stream(self, answer: _Answer, how: dict[str, Any], begun: float, speed: float, entry: dict[str, Any],
                      writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
                     b"Transfer-Encoding: chunked\r\n\r\n")
        end = "\r\n\r\n" if how["shape"] == "crlf" else "\n\n"
        _send(writer, "".join(f"data: {event}{end}" for event in answer.opening()))
        for place, events in enumerate(answer.chunks()):
            await _sleep_until(begun + speed * (how["ttft"] + place * how["itl"]))
            if place == how["drop_at"]:
                writer.transport.abort()
                return False
            if place == how["fail_at"]:
                _send(writer, f'data: {{"error": {{"message": "as asked", "code": 500}}}}{end}data: [DONE]{end}')
                writer.write(b"0\r\n\r\n")
                return True
            text = "".join(f"data: {event}{end}" for event in events)
            entry["written"].append(time.perf_counter())
            if how["shape"] == "cut":
                _send(writer, text[:7])
                await asyncio.sleep(0.001)
                entry["written"][-1] = time.perf_counter()
                text = text[7:]
            _send(writer, text)
        _send(writer, "".join(f"data: {event}{end}" for event in answer.closing()))
        writer.write(b"0\r\n\r\n")
        return True


_ROWS: dict[Any, list[str]] = {}


class _Answer:
    """The events of one streamed answer."""

    def __init__(self, path: str, body: dict[str, Any], how: dict[str, Any], prompt_tokens: int) -> None:
        self._chat = "chat" in path
        self._how, self._prompt_tokens = how, prompt_tokens
        self._count = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        self._ids = bool(body.get("return_token_ids"))
        self._head = {"id": "mock", "object": "chat.completion.chunk" if self._chat else "text_completion",
                      "created": 0, "model": "mock"}

    def opening(self) -> list[str]:
        if not self._chat:
            return []
        return [json.dumps(self._head | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""},
                                                      "finish_reason": None}]})]

    def chunks(self) -> Iterator[list[str]]:
        per, shape = self._how["per_chunk"], self._how["shape"]
        # All answers are alike, so rows can be cached: the server must not send late.
        for first in range(0, self._count, per):
            yield self._row(first, min(first + per, self._count))
        if shape == "held":
            yield [json.dumps(self._head | {"choices": [self._part(" end", [], None)]})]

    def _row(self, first: int, end: int) -> list[str]:
        how, last = self._how, end == self._count
        key = (self._chat, self._ids, first, end, last, how["shape"], how["usage"], self._prompt_tokens)
        if key in _ROWS:
            return _ROWS[key]
        tokens = list(range(first, end))
        text = "" if how["shape"] == "silent" else "".join(f" {token}" for token in tokens)
        event = self._head | {"choices": [self._part(text, tokens, "length" if last else None)]}
        if how["usage"] == "each" or (how["usage"] == "last" and last):
            event["usage"] = self._usage(end)
        row = [json.dumps(event)]
        if how["shape"] == "empty":
            row.insert(0, json.dumps(self._head | {"choices": [self._part("", [], None)]}))
            row.insert(0, json.dumps(self._head | {"choices": []}))
        return _ROWS.setdefault(key, row)

    def closing(self) -> list[str]:
        events = [json.dumps(self._head | {"choices": [], "usage": self._usage(self._count)})] \
            if self._how["usage"] == "own" else []
        return [*events, "[DONE]"] if self._how["done"] else events

    def _part(self, text: str, tokens: list[int], finish: str | None) -> dict[str, Any]:
        part: dict[str, Any] = {"index": 0, "finish_reason": finish}
        part |= {"delta": {"content": text}} if self._chat else {"text": text}
        if self._ids:
            part["token_ids"] = [token % 97 for token in tokens]
        return part

    def _usage(self, output: int) -> dict[str, Any]:
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": output,
                "total_tokens": self._prompt_tokens + output, "prompt_tokens_details": {"cached_tokens": 0}}


def _send(writer: asyncio.StreamWriter, text: str) -> None:
    if text:
        data = text.encode()
        writer.write(b"%x\r\n" % len(data) + data + b"\r\n")


def _whole(status: int, kind: str, text: str) -> bytes:
    data = text.encode()
    return (f"HTTP/1.1 {status} {'OK' if status == 200 else 'Error'}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(data)}\r\n\r\n").encode() + data


async def _sleep_until(when: float) -> None:
    while (left := when - time.perf_counter()) > 0:
        await asyncio.sleep(left)


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ttft", type=float, default=DEFAULTS["ttft"])
    parser.add_argument("--itl", type=float, default=DEFAULTS["itl"])
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--usage", default="own")
    parser.add_argument("--port", type=int, default=0)
    server = await asyncio.start_server(_Server(parser.parse_args()).serve, "127.0.0.1", parser.parse_args().port,
                                        backlog=1024, limit=1 << 24)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    try:
        import uvloop

        uvloop.run(_main())
    except ImportError:
        asyncio.run(_main())
