"""A router in front of four replicas: predicted time compared with round robin, cache hits, overhead, and recovery.

    python benchmarks/router.py --output-json benchmarks/results/router.json
    python benchmarks/router.py --trace mooncake_conversation_trace.jsonl
    python benchmarks/router.py --smollm2 --parts tenants --output-json benchmarks/results/router-smollm2.json

Replicas are `spill serve --load-format null --simulate-step`: real HTTP, scheduler, prefix cache and KV events, and
steps that take a given time instead of computing. With --smollm2 they run the default model, with one thread each, and
the workload is smaller. All routers use the same replicas and take turns, with the same requests at the same times;
caches are emptied between turns. The tenants are llm-d's workload scaled down: many tenants, each with a long prefix
that its users share, and KV for 73% of the fleet's memory. The hit rate is that of prompt tokens, as reported by the
answers; its ceiling is the hit rate of one unlimited cache. Prompts are token ids, except for the chats of `added`.
Parts that are not run (--parts) keep their results in the file.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from router_decisions import decisions
from server_process import ServerProcess, free_port

from spillover.bench.provenance import provenance
from spillover.bench.serving.http_client import Call, Connection, Reply
from spillover.http_wire import Sink
from spillover.plan.hardware import probe

BLOCK = 16
PARTS = ("decision", "tenants", "no-reuse", "added", "kill")
SMALL = {"parts": "tenants,no-reuse,kill", "policies": "round-robin,prefix,predicted", "tenants": 10, "users": 6,
         "prefix": 384, "question": 32, "output": 4, "rate": 0.9, "requests": 36, "no_reuse_rate": 1.2,
         "no_reuse_lengths": "32,128,384", "max_model_len": 1024, "warm": 8}  # defaults of --smollm2
FLOORS = {"tenants_ttft_or_throughput": 2.0, "hit_rate_of_ceiling": 0.98, "no_reuse_throughput": 0.98,
          "no_reuse_ttft": 0.98, "heal_seconds": 1.0, "decision_p99_ms": 1.0, "added_p50_ms": 3.0,
          "trace_ttft_or_throughput": 2.0}


@dataclass(frozen=True)
class Request:
    at: float  # seconds from the start
    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True)
class Answered:
    ttft: float | None  # seconds from when it was due; None: it failed before its first token
    finished: float  # seconds on the clock of the run
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    complete: bool
    error: str = ""
    token_times: tuple[float, ...] = ()  # arrival times of its tokens, on the clock of the run


def tenants(arguments: argparse.Namespace, draw: random.Random) -> list[Request]:
    words = itertools.count()

    def text(tokens: int) -> list[int]:
        start = next(words)
        return [1000 + (start * 7919 + place * 104_729) % 40_000 for place in range(tokens)]

    prefixes = [text(arguments.prefix) for _ in range(arguments.tenants)]
    order = [tenant for tenant in range(arguments.tenants) for _ in range(arguments.users)]
    draw.shuffle(order)
    times = arrivals(len(order), arguments.rate, draw)
    return [Request(at, prefixes[tenant] + text(arguments.question), arguments.output)
            for at, tenant in zip(times, order, strict=True)]


def no_reuse(arguments: argparse.Namespace, draw: random.Random) -> list[Request]:
    lengths = [int(each) for each in arguments.no_reuse_lengths.split(",")]
    return [Request(at, [draw.randrange(1000, 40_000) for _ in range(draw.choice(lengths))], arguments.output)
            for at in arrivals(arguments.requests, arguments.no_reuse_rate, draw)]


def trace(path: Path, count: int, scale: int, rate: float) -> list[Request]:
    """Read a Mooncake trace; make its blocks of 512 tokens `scale` times smaller and its mean request rate `rate`."""
    size, rows = 512 // scale, [json.loads(line) for line in itertools.islice(path.open(), count)]
    last = rows[-1]["timestamp"] or 1
    made = []
    for row in rows:
        prompt = [1000 + (block * 7919 + place * 104_729) % 40_000
                  for block in row["hash_ids"] for place in range(size)]
        length = max(1, min(8000, row["input_length"] // scale))  # replicas accept 8,192
        made.append(Request(row["timestamp"] / last * count / rate, prompt[:length],
                            max(1, min(64, row["output_length"] // scale))))
    return made


def arrivals(count: int, rate: float, draw: random.Random) -> Iterator[float]:
    return itertools.accumulate(draw.expovariate(rate) for _ in range(count))


def ceiling(requests: Sequence[Request]) -> float:
    """Return the share of prompt tokens that one unlimited cache would find, in whole blocks without the last token."""
    seen: set[int] = set()
    found = total = 0
    for request in requests:
        key, hits, unbroken = 0, 0, True
        for start in range(0, len(request.prompt) - BLOCK + 1, BLOCK):
            key = hash((key, tuple(request.prompt[start:start + BLOCK])))
            unbroken = unbroken and key in seen
            hits += unbroken
            seen.add(key)
        found += min(hits, (len(request.prompt) - 1) // BLOCK) * BLOCK
        total += len(request.prompt)
    return found / total


async def play(url: str, requests: Sequence[Request]) -> list[Answered]:
    begun, idle = time.perf_counter(), list[Connection]()
    place = urlsplit(url)
    assert place.hostname is not None

    async def one(request: Request) -> Answered:
        await asyncio.sleep(max(0.0, begun + request.at - time.perf_counter()))
        connection = idle.pop() if idle else Connection(place.hostname or "", place.port or 80)
        body = json.dumps({"prompt": request.prompt, "max_tokens": request.output_tokens, "ignore_eos": True,
                           "stream": True, "stream_options": {"include_usage": True}}).encode()
        pieces: list[tuple[float, bytes]] = []

        def sink(reply: Reply) -> Sink:
            return lambda at, piece: pieces.append((at, piece))

        error, reply = "", None
        try:
            async with asyncio.timeout(120):
                reply = await connection.exchange(Call("POST", "/v1/completions", body), sink)
            idle.append(connection)
        except (ConnectionError, TimeoutError) as failure:
            error = repr(failure)
            await connection.close()
        text = b"".join(piece for _, piece in pieces)
        fine = reply is not None and reply.status == 200 and b"data: [DONE]" in text
        usage: dict[str, Any] = {}
        for line in text.split(b"\n"):
            if fine and line.startswith(b'data: {') and b'"usage":{' in line:
                usage = json.loads(line[6:])["usage"]
        first = pieces[0][0] - begun - request.at if pieces and reply is not None and reply.status == 200 else None
        details = usage.get("prompt_tokens_details") or {}
        return Answered(first, time.perf_counter() - begun, usage.get("prompt_tokens", 0),
                        details.get("cached_tokens", 0), usage.get("completion_tokens", 0), fine,
                        "" if fine else error or text[:200].decode(errors="replace"),
                        tuple(at - begun for at, _ in pieces[:request.output_tokens]))

    return await asyncio.gather(*(one(request) for request in requests))


def summary(answers: Sequence[Answered]) -> dict[str, Any]:
    first = sorted(each.ttft for each in answers if each.ttft is not None)
    prompt = sum(each.prompt_tokens for each in answers)
    seconds = max(each.finished for each in answers)
    return {"requests": len(answers), "failed": sum(not each.complete for each in answers),
            "ttft_mean": statistics.fmean(first), "ttft_p50": statistics.median(first),
            "ttft_p90": first[int(0.9 * (len(first) - 1))], "seconds": seconds,
            "requests_per_second": len(answers) / seconds,
            "tokens_per_second": sum(each.prompt_tokens + each.output_tokens for each in answers) / seconds,
            "hit_rate": sum(each.cached_tokens for each in answers) / prompt if prompt else 0.0}


@contextmanager
def fleet(arguments: argparse.Namespace, blocks: int) -> Iterator[tuple[list[ServerProcess], dict[str, ServerProcess]]]:
    """Start replicas, and a router in front of them for each policy."""
    with ExitStack() as stack:
        servers = []
        for _ in range(arguments.replicas):
            events = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{free_port()}",
                      "replay_endpoint": f"tcp://127.0.0.1:{free_port()}"}
            servers.append(stack.enter_context(ServerProcess(
                *([arguments.model] if arguments.model else []),
                *([] if arguments.smollm2 else ["--load-format", "null", "--simulate-step", arguments.step]),
                "--max-model-len", str(arguments.max_model_len), "--num-gpu-blocks-override", str(blocks),
                "--enable-admin-routes", "--no-log-requests", "--kv-events-config", json.dumps(events),
                environment={"OMP_NUM_THREADS": "1"})))
        routers = {policy: stack.enter_context(ServerProcess(
            *(server.url for server in servers), "--routing-policy", policy, "--no-log-requests", command="router"))
            for policy in arguments.policies.split(",")}
        yield servers, routers


async def warm(routers: dict[str, ServerProcess], requests: Sequence[Request]) -> None:
    for router in routers.values():
        await play(router.url, requests)


async def reset(servers: Sequence[ServerProcess]) -> None:
    for server in servers:
        place = urlsplit(server.url)
        connection = Connection(place.hostname or "", place.port or 80)
        await connection.read(await connection.send(Call("POST", "/reset_prefix_cache", b"{}")))
        await connection.close()
    await asyncio.sleep(1.5)  # until the routers have received the events


async def compare(servers: Sequence[ServerProcess], routers: dict[str, ServerProcess], requests: Sequence[Request],
                  repeats: int) -> dict[str, dict[str, Any]]:
    """Let the policies take turns, back and forth; return means over the turns, and the mean TTFT of each turn."""
    runs: dict[str, list[dict[str, Any]]] = {policy: [] for policy in routers}
    for repeat in range(repeats):
        for policy in list(routers) if repeat % 2 == 0 else list(routers)[::-1]:
            await reset(servers)
            runs[policy].append(summary(await play(routers[policy].url, requests)))
    return {policy: {name: statistics.fmean(run[name] for run in each) for name in each[0]}
            | {"ttft_mean_of_each": [run["ttft_mean"] for run in each]} for policy, each in runs.items()}


async def kill(servers: Sequence[ServerProcess], router: ServerProcess, requests: Sequence[Request]) -> dict[str, Any]:
    """Kill a replica in the middle of a run; return what failed, and when the router stopped using the replica."""
    place = urlsplit(router.url)
    connection = Connection(place.hostname or "", place.port or 80)

    async def killer() -> float:
        await asyncio.sleep(requests[len(requests) // 2].at)
        os.kill(servers[0].pid, signal.SIGKILL)
        killed = time.perf_counter()
        while True:
            shown = json.loads(await connection.read(await connection.send(Call("GET", "/replicas"))))["replicas"]
            if not shown[0]["ready"]:
                return time.perf_counter() - killed
            await asyncio.sleep(0.005)

    answers, healed = await asyncio.gather(play(router.url, requests), killer())
    await connection.close()
    at = requests[len(requests) // 2].at
    after = [each.ttft for each, request in zip(answers, requests, strict=True)
             if request.at > at + 1.0 and each.ttft is not None]
    return {"heal_seconds": healed, "requests": len(answers), "failed_before_first_token": sum(
        each.ttft is None for each in answers), "broken_streams": sum(each.ttft is not None and not each.complete
                                                                       for each in answers),
            "ttft_p50_from_1_s_after": statistics.median(after) if after else None}


async def added(server: ServerProcess, router: ServerProcess, count: int, make: Any) -> dict[str, float]:
    """Return the TTFT that the router adds, one request at a time, alternating between direct and routed."""
    times: dict[str, list[float]] = {"direct": [], "routed": []}
    for place in range(count + 10):
        for name, url in (("direct", server.url), ("routed", router.url)):
            parts = urlsplit(url)
            connection = CONNECTIONS.setdefault(url, Connection(parts.hostname or "", parts.port or 80))
            path, body = make(place)
            first: list[float] = []

            def sink(reply: Reply, first: list[float] = first) -> Sink:
                return lambda at, piece: first.append(at)

            begun = time.perf_counter()
            await connection.exchange(Call("POST", path, json.dumps(body).encode()), sink)
            if place >= 10:
                times[name].append(first[0] - begun)
    direct, routed = statistics.median(times["direct"]), statistics.median(times["routed"])
    return {"direct_p50_ms": direct * 1e3, "routed_p50_ms": routed * 1e3, "added_p50_ms": (routed - direct) * 1e3}


def small_completion(place: int) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": [5 + place % 3] * 240, "stream": True, "max_tokens": 2}


def small_chat(place: int) -> tuple[str, dict[str, Any]]:
    message = {"role": "user", "content": f"{place % 3} squares and none. " * 40}
    return "/v1/chat/completions", {"messages": [message], "stream": True, "max_tokens": 2}


CONNECTIONS: dict[str, Connection] = {}


def shown(name: str, both: dict[str, dict[str, Any]], best: float | None = None) -> dict[str, float]:
    """Print a comparison; return ratios of predicted time to round robin, where above 1 is better."""
    for policy, row in both.items():
        print(f"{name:12}{policy:14}TTFT mean {row['ttft_mean'] * 1e3:8.1f} ms  p50 {row['ttft_p50'] * 1e3:8.1f}  p90 "
              f"{row['ttft_p90'] * 1e3:8.1f}  {row['requests_per_second']:6.1f} req/s  hit rate {row['hit_rate']:.3f}"
              f"{'' if best is None else f' of {best:.3f}'}  failed {row['failed']:.0f}")
    blind, routed = both["round-robin"], both["predicted"]
    return {"ttft_mean": blind["ttft_mean"] / routed["ttft_mean"], "ttft_p90": blind["ttft_p90"] / routed["ttft_p90"],
            "throughput": routed["requests_per_second"] / blind["requests_per_second"]}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model of the replicas; default: the default model")
    parser.add_argument("--smollm2", action="store_true", help="replicas that compute with the model, and other "
                        "defaults for the options below")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to measure; default: %(default)s")
    parser.add_argument("--policies", default="round-robin,predicted")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--step", default="5,0.1", help="--simulate-step of the replicas")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--blocks", type=int, help="KV blocks of a replica; default: such that the tenants' KV takes "
                        "73%% of the fleet's")
    parser.add_argument("--warm", type=int, default=40, help="warm-up requests to each router")
    parser.add_argument("--tenants", type=int, default=75)
    parser.add_argument("--users", type=int, default=5, help="requests per tenant")
    parser.add_argument("--prefix", type=int, default=1200, help="tokens that a tenant's requests share")
    parser.add_argument("--question", type=int, default=240)
    parser.add_argument("--output", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--rate", type=float, default=30.0, help="requests per second of the tenants")
    parser.add_argument("--requests", type=int, default=400, help="number of requests without reuse")
    parser.add_argument("--no-reuse-rate", type=float, default=30.0)
    parser.add_argument("--no-reuse-lengths", default="64,256,1024", help="tokens of prompts")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--trace", type=Path, help="a Mooncake trace (JSON lines)")
    parser.add_argument("--trace-requests", type=int, default=2000)
    parser.add_argument("--trace-rate", type=float, default=22.0, help="requests per second, at which predicted time "
                        "keeps up (benchmarks/router_trace.py shows others)")
    parser.add_argument("--trace-blocks", type=int, default=16_000, help="KV blocks of a replica for the trace, whose "
                        "KV is about twice what four replicas hold")
    parser.add_argument("--output-json", type=Path)
    if parser.parse_known_args()[0].smollm2:
        parser.set_defaults(**SMALL)
    arguments = parser.parse_args()
    arguments.parts = arguments.parts.split(",")
    if not set(arguments.parts) <= set(PARTS):
        parser.error(f"--parts knows {', '.join(PARTS)}")
    if arguments.blocks is None:
        demand = arguments.tenants * (arguments.prefix + arguments.users * (arguments.question + arguments.output))
        arguments.blocks = int(demand / BLOCK / 0.73 / arguments.replicas)
    return arguments


async def measure(arguments: argparse.Namespace, servers: Sequence[ServerProcess], routers: dict[str, ServerProcess],
                  result: dict[str, Any]) -> None:
    """Measure the parts that need a fleet, one after another."""
    draw = random.Random(7)
    await warm(routers, no_reuse(arguments, draw)[:arguments.warm])
    requests = tenants(arguments, draw)
    ratios = result.setdefault("ratios", {})
    if "tenants" in arguments.parts:
        best = ceiling(requests)
        both = await compare(servers, routers, requests, arguments.repeats)
        result["tenants"] = {**both, "ceiling": best}
        ratios["tenants"] = shown("tenants", both, best)
    unique = no_reuse(arguments, draw)
    if "no-reuse" in arguments.parts:
        result["no_reuse"] = await compare(servers, routers, unique, 2 * arguments.repeats)
        ratios["no_reuse"] = shown("no reuse", result["no_reuse"])
    if "added" in arguments.parts:
        await reset(servers)
        for kind, make in (("tokens", small_completion), ("chat", small_chat)):
            result[f"added_{kind}"] = await added(servers[1], routers["predicted"], 150, make)
            print(f"added to the first token, {kind:7}: {result[f'added_{kind}']['added_p50_ms']:.2f} ms p50 "
                  f"({result[f'added_{kind}']['direct_p50_ms']:.2f} ms without)")
    if "kill" in arguments.parts:
        await reset(servers)
        result["kill"] = await kill(servers, routers["predicted"], tenants(arguments, draw))
        print("kill -9 of a replica: not used after {heal_seconds:.3f} s; of {requests} requests "
              "{failed_before_first_token} failed before their first token, {broken_streams} streams "
              "broke".format_map(result["kill"]))


def floors(result: dict[str, Any]) -> dict[str, float]:
    """Return the measured value of each quantity that has a floor."""
    ratios, found = result["ratios"], {}
    if "tenants" in result:
        found["tenants_ttft_or_throughput"] = max(ratios["tenants"]["ttft_mean"], ratios["tenants"]["throughput"])
        found["hit_rate_of_ceiling"] = result["tenants"]["predicted"]["hit_rate"] / result["tenants"]["ceiling"]
    if "no_reuse" in result:
        found |= {"no_reuse_throughput": ratios["no_reuse"]["throughput"],
                  "no_reuse_ttft": ratios["no_reuse"]["ttft_mean"]}
    if "kill" in result:
        found["heal_seconds"] = result["kill"]["heal_seconds"]
    if "decision" in result:
        found["decision_p99_ms"] = result["decision"]["decide_p99_ms"]
    if "added_tokens" in result:
        found["added_p50_ms"] = result["added_tokens"]["added_p50_ms"]
    if "trace" in result:
        found["trace_ttft_or_throughput"] = max(ratios["trace"]["ttft_mean"], ratios["trace"]["throughput"])
    return found


async def main() -> None:
    arguments = parsed()
    output: Path | None = arguments.output_json
    result: dict[str, Any] = json.loads(output.read_text()) if output is not None and output.exists() else {}
    if "decision" in arguments.parts:
        result["decision"] = decisions(arguments.replicas, 2000, 3.0)
        print("decision at {reached_per_second:,.0f}/s: p50 {decide_p50_ms:.3f} ms, p99 {decide_p99_ms:.3f} ms"
              .format_map(result["decision"]))
    if {*arguments.parts} - {"decision"}:
        with fleet(arguments, arguments.blocks) as (servers, routers):
            await measure(arguments, servers, routers, result)
    if arguments.trace is not None:
        played = trace(arguments.trace, arguments.trace_requests, 8, arguments.trace_rate)
        with fleet(arguments, arguments.trace_blocks) as (servers, routers):
            await warm(routers, no_reuse(arguments, random.Random(8))[:arguments.warm])
            both = await compare(servers, routers, played, 1)
        result["trace"] = {**both, "ceiling": ceiling(played)}
        result["ratios"]["trace"] = shown("trace", both, result["trace"]["ceiling"])
    result["floors"] = floors(result)
    for name, value in result["floors"].items():
        most = name.endswith(("seconds", "_ms"))
        met = value <= FLOORS[name] if most else value >= FLOORS[name]
        print(f"{name:28}{value:8.3f}  {'at most' if most else 'at least'} {FLOORS[name]:g}: {'yes' if met else 'NO'}")
    if output is not None:
        result["arguments"] = {name: str(value) if isinstance(value, Path) else value
                               for name, value in vars(arguments).items() if name not in ("trace", "output_json")}
        result |= provenance(asdict(probe()))
        result["command"] = shlex.join(["python", *(Path(each).name if "/" in each and each.endswith(".jsonl") else each
                                                    for each in sys.argv)])
        result.setdefault("commands", {}).update(dict.fromkeys(arguments.parts, result["command"]))
        output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
