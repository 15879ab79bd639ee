"""The simulator compared with real runs: one and two replicas behind the router, predicted and measured on one trace.

    python benchmarks/simulate.py --output-json benchmarks/results/simulator.json
    python benchmarks/simulate.py --rate 7 --append --output-json benchmarks/results/simulator.json  # near saturation

Replicas are `spill serve --load-format null --simulate-step`: real HTTP, scheduler, prefix cache, KV events and router,
and steps that take a given time instead of computing. Step costs are thus known, and all else is compared: batching,
caches, queues, routing. The time of a request outside of steps is measured first, with one request at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from made_by import made_by
from server_process import ServerProcess, free_port

from spillover.bench.serving.http_client import Call, Connection, Reply
from spillover.cluster.simulate.arrivals import Arrival, BlockNames
from spillover.cluster.simulate.batching import ReplicaSettings
from spillover.cluster.simulate.calibration import FORMAT, WITHIN, errors
from spillover.cluster.simulate.costs import given
from spillover.cluster.simulate.report import summary
from spillover.cluster.simulate.run import FleetSettings, simulate
from spillover.http_wire import Sink

BLOCK = 16
MEASURED = ("ttft_mean", "ttft_p50", "ttft_p95", "itl_mean", "itl_p95", "requests_per_second", "hit_rate")
SETTINGS = ((1, "predicted"), (2, "predicted"), (2, "round-robin"))


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
    token_times: tuple[float, ...]  # arrival times of its tokens, on the clock of the run


def tenants(arguments: argparse.Namespace, draw: random.Random, replicas: int) -> list[Request]:
    """Return the requests of tenants with a long prefix each, whose users send them in random order."""
    prefixes = [_text(draw, arguments.prefix) for _ in range(arguments.tenants)]
    order = [tenant for tenant in range(arguments.tenants) for _ in range(arguments.users)]
    draw.shuffle(order)
    times = arrivals(len(order), replicas * arguments.rate, draw)
    return [Request(at, prefixes[tenant] + _text(draw, arguments.question), arguments.output)
            for at, tenant in zip(times, order, strict=True)]


def no_reuse(arguments: argparse.Namespace, draw: random.Random, replicas: int) -> list[Request]:
    return [Request(at, _text(draw, draw.choice((64, 256, 1024))), arguments.output)
            for at in arrivals(arguments.requests * replicas, replicas * arguments.rate, draw)]


def arrivals(count: int, rate: float, draw: random.Random) -> Iterator[float]:
    return itertools.accumulate(draw.expovariate(rate) for _ in range(count))


def _text(draw: random.Random, tokens: int) -> list[int]:
    return [draw.randrange(1000, 40_000) for _ in range(tokens)]


def connect(url: str) -> Connection:
    place = urlsplit(url)
    return Connection(place.hostname or "", place.port or 80)


async def play(url: str, requests: Sequence[Request]) -> list[Answered]:
    """Send every request when it is due, and return the answers."""
    begun, idle = time.perf_counter(), list[Connection]()

    async def one(request: Request) -> Answered:
        await asyncio.sleep(max(0.0, begun + request.at - time.perf_counter()))
        connection = idle.pop() if idle else connect(url)
        body = json.dumps({"prompt": request.prompt, "max_tokens": request.output_tokens, "ignore_eos": True,
                           "stream": True, "stream_options": {"include_usage": True}}).encode()
        pieces: list[tuple[float, bytes]] = []

        def sink(reply: Reply) -> Sink:
            return lambda at, piece: pieces.append((at, piece))

        reply = None
        try:
            async with asyncio.timeout(120):
                reply = await connection.exchange(Call("POST", "/v1/completions", body), sink)
            idle.append(connection)
        except (ConnectionError, TimeoutError):
            await connection.close()
        usage: dict[str, Any] = {}
        for line in b"".join(piece for _, piece in pieces).split(b"\n"):
            if line.startswith(b"data: {") and b'"usage":{' in line:
                usage = json.loads(line[6:])["usage"]
        first = pieces[0][0] - begun - request.at if pieces and reply is not None and reply.status == 200 else None
        details = usage.get("prompt_tokens_details") or {}
        return Answered(first, time.perf_counter() - begun, usage.get("prompt_tokens", 0),
                        details.get("cached_tokens", 0), tuple(at - begun for at, _ in pieces[:request.output_tokens]))

    return await asyncio.gather(*(one(request) for request in requests))


async def reset(servers: Sequence[ServerProcess]) -> None:
    for server in servers:
        connection = connect(server.url)
        await connection.read(await connection.send(Call("POST", "/reset_prefix_cache", b"{}")))
        await connection.close()
    await asyncio.sleep(1.5)  # until the routers have received the events


async def first_token_seconds(server: ServerProcess, router: ServerProcess, count: int) -> tuple[float, float]:
    """Return the median TTFT of one request at a time, sent to the server and through the router in turns."""
    times: dict[str, list[float]] = {server.url: [], router.url: []}
    connections = {url: connect(url) for url in times}
    for place in range(count + 10):
        body = json.dumps({"prompt": [5 + place % 3] * 240, "stream": True, "max_tokens": 2}).encode()
        for url, found in times.items():
            first: list[float] = []

            def sink(reply: Reply, first: list[float] = first) -> Sink:
                return lambda at, piece: first.append(at)

            begun = time.perf_counter()
            await connections[url].exchange(Call("POST", "/v1/completions", body), sink)
            if place >= 10:  # the first ones are a warm-up
                found.append(first[0] - begun)
    for connection in connections.values():
        await connection.close()
    return statistics.median(times[server.url]), statistics.median(times[router.url])


def measured(answers: Sequence[Answered]) -> dict[str, float]:
    first = [each.ttft for each in answers if each.ttft is not None]
    gaps = [after - before for each in answers for before, after in itertools.pairwise(each.token_times)]
    seconds = max(each.finished for each in answers)
    return {"ttft_mean": float(np.mean(first)), "ttft_p50": float(np.percentile(first, 50)),
            "ttft_p95": float(np.percentile(first, 95)), "itl_mean": float(np.mean(gaps)),
            "itl_p95": float(np.percentile(gaps, 95)), "requests_per_second": len(answers) / seconds,
            "hit_rate": sum(each.cached_tokens for each in answers) / sum(each.prompt_tokens for each in answers)}


def predicted(requests: Sequence[Request], settings: FleetSettings, step: str) -> dict[str, float]:
    names, costs = BlockNames(BLOCK), given(step)
    assert costs is not None
    made = [Arrival(each.at, len(each.prompt), each.output_tokens, names.keys(_blocks(each.prompt)))
            for each in requests]
    found = summary(simulate(made, settings, costs.fit.costs))
    return {name: found[name] for name in MEASURED}


def _blocks(tokens: Sequence[int]) -> list[tuple[tuple[int, ...], int]]:
    parts = [tuple(tokens[start:start + BLOCK]) for start in range(0, len(tokens), BLOCK)]
    return [(part, len(part)) for part in parts]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", default="20,0.1", help="--simulate-step of the replicas")
    parser.add_argument("--blocks", type=int, default=4000, help="KV blocks of a replica")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--tenants", type=int, default=30)
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--prefix", type=int, default=1200)
    parser.add_argument("--question", type=int, default=240)
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--requests", type=int, default=100, help="requests per replica without reuse")
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second and replica")
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("--append", action="store_true", help="keep the points that are in the file")
    arguments = parser.parse_args()
    flags = ("--load-format", "null", "--simulate-step", arguments.step, "--max-model-len", "8192",
             "--num-gpu-blocks-override", str(arguments.blocks), "--max-num-seqs", str(arguments.max_num_seqs),
             "--max-num-batched-tokens", str(arguments.max_num_batched_tokens), "--enable-admin-routes",
             "--no-log-requests")
    costs = given(arguments.step)
    assert costs is not None
    points: list[dict[str, Any]] = []
    outside = {"request_seconds": 0.0, "router_seconds": 0.0}
    with ExitStack() as stack:
        servers = []
        for _ in range(2):
            events = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{free_port()}",
                      "replay_endpoint": f"tcp://127.0.0.1:{free_port()}"}
            servers.append(stack.enter_context(ServerProcess(*flags, "--kv-events-config", json.dumps(events),
                                                             environment={"OMP_NUM_THREADS": "1"})))
        for replicas, policy in SETTINGS:
            with ServerProcess(*(server.url for server in servers[:replicas]), "--routing-policy", policy,
                               "--no-log-requests", command="router") as router:
                await play(router.url, no_reuse(arguments, random.Random(1), 1)[:20])  # warm-up
                if not points:
                    direct, routed = await first_token_seconds(servers[0], router, 60)
                    alone = costs.fit.costs.step + BLOCK * costs.fit.costs.prefill_token  # all but one block cached
                    outside = {"request_seconds": max(0.0, direct - alone), "router_seconds": max(0.0, routed - direct)}
                for workload, make in (("tenants", tenants), ("no reuse", no_reuse)):
                    requests = make(arguments, random.Random(7), replicas)
                    await reset(servers)
                    real = measured(await play(router.url, requests))
                    settings = FleetSettings(replicas, 0, policy, replica=ReplicaSettings(
                        arguments.max_num_seqs, arguments.max_num_batched_tokens, BLOCK, arguments.blocks),
                        request_seconds=outside["request_seconds"], router_seconds=outside["router_seconds"])
                    made = predicted(requests, settings, arguments.step)
                    wrong = errors(real, made)
                    points.append({"workload": workload, "rate": replicas * arguments.rate, "replicas": replicas,
                                   "policy": policy, "requests": len(requests), "measured": real, "predicted": made,
                                   "errors": wrong})
                    print(f"{workload:10}{replicas} x {policy:12}", "  ".join(
                        f"{name} {real[name]:.4g} ({wrong.get(name, math.nan):+.1%})" for name in MEASURED))
    result: dict[str, Any] = {"format": FORMAT, "step": arguments.step, "outside": outside, "points": points}
    worst = max(abs(point["errors"][name]) for point in points for name in ("ttft_mean", "requests_per_second"))
    print(f"mean TTFT and throughput within {worst:.1%} of the measured; aim {WITHIN:.0%}: "
          f"{'yes' if worst <= WITHIN else 'NO'}")
    if arguments.output_json is not None:
        result |= {"arguments": {name: value for name, value in vars(arguments).items() if name != "output_json"},
                   **made_by()}
        if arguments.append and arguments.output_json.exists():
            before = json.loads(arguments.output_json.read_text())
            result["points"] = before.pop("points") + points
            result["before"] = before
        arguments.output_json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
