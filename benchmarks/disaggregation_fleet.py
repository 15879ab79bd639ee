"""Servers for disaggregation.py and disaggregation_kills.py: engines with one shared pool, routers in front of them,
and a client that records when each token arrived."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpu_workload import MODELS
from host_pool_processes import SHAPES
from server_process import ServerProcess

from spillover.bench.serving.http_client import Call, Connection, Reply, Sink

BLOCK = 16
_NUMBERS = itertools.count()


def shape_of(model: str) -> dict[str, Any]:
    """Return a model's config.json, or at least its entries that these scripts use."""
    if model == "smollm2":
        return {"vocab_size": 49152, "num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64}
    shape: dict[str, Any] | None = SHAPES.get(model) or MODELS.get(model)
    return json.loads(Path(model, "config.json").read_text()) if shape is None else shape


def model_flags(model: str, folder: Path) -> list[str]:
    """Return the flags for a known shape with random weights, for the default model (`smollm2`), or for a model in a
    folder; all without a tokenizer, as prompts are token ids."""
    if model == "smollm2":
        return ["--skip-tokenizer-init"]
    shape = SHAPES.get(model) or MODELS.get(model)
    if shape is None:
        return [model, "--skip-tokenizer-init"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    return [str(folder), "--load-format", "dummy", "--skip-tokenizer-init"]


def vocabulary(model: str) -> int:
    return int(shape_of(model)["vocab_size"])


def engine(flags: list[str], store: list[str], environment: dict[str, str], ready_seconds: float,
           folder: Path) -> ServerProcess:
    """Return a server that spills every full block to a shared store and publishes KV events for a router, through
    sockets in a folder."""
    number = next(_NUMBERS)
    events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{folder}/events-{number}",
              "replay_endpoint": f"ipc://{folder}/replay-{number}"}
    return ServerProcess(*flags, *store, "--spill", "eager", "--kv-events-config", json.dumps(events),
                         "--no-log-requests", environment=environment, ready_seconds=ready_seconds)


def router(servers: list[ServerProcess], mode: str, prefill: int = 1, *more: str) -> ServerProcess:
    """Return a router in front of `servers`, the first `prefill` of them for prompts; `mode`: for --disaggregation."""
    roles = ["--prefill-replicas", str(prefill)] if mode != "never" else []
    return ServerProcess(*(server.url for server in servers), "--disaggregation", mode, *roles, "--no-log-requests",
                         *more, command="router", ready_seconds=60)


def signal_tree(server: ServerProcess, number: signal.Signals) -> None:
    """Send a signal to all processes of a server: the front, and its engine."""
    for process in [*server.children(), None]:
        try:
            if process is None:
                os.kill(server.pid, number)
            else:
                process.send_signal(number)
        except (ProcessLookupError, OSError):
            continue
        except Exception as error:  # psutil's own exception for a process that has just exited
            if type(error).__name__ != "NoSuchProcess":
                raise


@dataclass
class Answer:
    """One answer as its client observed it; times are those of time.perf_counter."""

    sent: float
    times: list[float] = field(default_factory=list)  # arrival times of tokens
    ended: float = 0.0
    status: int = 0
    tokens: list[int] = field(default_factory=list)  # token ids, if they were requested
    timings: dict[str, Any] = field(default_factory=dict)  # as reported by the server that decoded
    error: str = ""

    @property
    def fine(self) -> bool:
        return self.status == 200 and not self.error

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]


async def ask(url: str, prompt: list[int], tokens: int, seconds: float, stream: bool = True,
              ids: bool = False, into: list[float] | None = None, salt: str | None = None) -> Answer:
    """Request a completion; return within `seconds` in any case. `into`: list that gets token times on arrival."""
    place = urlsplit(url)
    connection = Connection(place.hostname or "", place.port or 80)
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                            "return_timings": True, "stream": stream}
    if stream:  # makes the server send one event per token, though there is no text
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if ids:
        body["return_token_ids"] = True
    if salt is not None:
        body["cache_salt"] = salt
    answer = Answer(time.perf_counter())
    if into is not None:
        answer.times = into
    pieces: list[bytes] = []

    def sink(reply: Reply) -> Sink:
        answer.status = reply.status
        return take

    def take(at: float, piece: bytes) -> None:
        pieces.append(piece)
        came = piece.count(b"data: {") if stream and answer.status == 200 else 0
        answer.times.extend([at] * min(came, tokens - len(answer.times)))

    try:
        async with asyncio.timeout(seconds):
            await connection.exchange(Call("POST", "/v1/completions", json.dumps(body).encode()), sink)
    except (ConnectionError, asyncio.IncompleteReadError, TimeoutError, ValueError) as failure:
        answer.error = repr(failure)
    finally:
        answer.ended = time.perf_counter()
        await connection.close()
    if not answer.error:
        _read(answer, b"".join(pieces), stream)
    return answer


def _read(answer: Answer, text: bytes, stream: bool) -> None:
    """Read tokens, timings and errors from the received bytes into `answer`."""
    try:
        events = [json.loads(line[6:]) for line in text.split(b"\n") if line.startswith(b"data: {")] if stream else [
            json.loads(text)]
    except ValueError:
        answer.error = text[-300:].decode(errors="replace")
        return
    for event in events:
        if "error" in event:
            answer.error = str(event["error"])
        answer.timings = next(iter(event.get("timings") or ()), answer.timings)
        for choice in event.get("choices", ()):
            answer.tokens += choice.get("token_ids") or []
    if answer.status != 200 and not answer.error:
        answer.error = text[-300:].decode(errors="replace")


def until_exact(routed: ServerProcess, seconds: float = 30.0) -> None:
    """Wait until a router knows the blocks of all replicas exactly, from their KV events."""
    import urllib.request

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{routed.url}/replicas", timeout=5) as shown:
            replicas = json.load(shown)["replicas"]
        if all(each["ready"] and each["index_state"] == "exact" for each in replicas):
            return
        time.sleep(0.1)
    raise TimeoutError(f"after {seconds:.0f} s the router knows of its replicas: {replicas}\n{routed.log[-2000:]}")


def started(stack: ExitStack, servers: list[ServerProcess]) -> None:
    """Start servers at the same time; closing the stack stops them."""
    for server in servers:
        stack.callback(server.close)
        server.launch()
    for server in servers:
        server.wait_until_ready()
