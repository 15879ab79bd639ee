"""Latency of a router's decision at a given rate, and the rate of requests that the router reaches over HTTP.

    python benchmarks/router_decisions.py --output-json benchmarks/results/router_decisions.json

`decisions`: a fleet whose replicas hold 100,000 blocks each, known exactly, with prefixes in host memory too; prompts
of 7,200 tokens, of which 6,000 are a tenant's prefix; half of the requests in flight compute the same blocks. Decisions
are made at this rate, not as fast as possible: a late one counts from when it was due. `http`: the real `spill router`
in front of servers that answer at once, with enough connections to keep it busy; its CPU time shows what one core of it
can do, and its own histogram how long decisions took.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import time
import urllib.request
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from server_process import ServerProcess, free_port

from spillover.bench.provenance import provenance
from spillover.bench.serving.http_client import Call, Connection, Reply
from spillover.cluster.fleet import Fleet, Keys, Prompt
from spillover.cluster.mirror import Mirror
from spillover.cluster.policy import PredictedTime
from spillover.cluster.replica import Flight, ReplicaReport
from spillover.http_wire import Sink
from spillover.memory.kv.event_wire import CPU, GPU
from spillover.plan.hardware import probe

BLOCK, TENANTS, PREFIX, OWN = 16, 150, 375, 75  # blocks
HELD, OPEN = 100_000, 200  # blocks that a replica holds; number of requests in flight


def fleet(replicas: int, draw: random.Random) -> tuple[Fleet, list[Prompt]]:
    made = Fleet(PredictedTime())
    prefixes = [tuple(draw.getrandbits(64) for _ in range(PREFIX)) for _ in range(TENANTS)]
    for place in range(replicas):
        replica = made.add(f"replica-{place}", "space")
        replica.ready = True
        made.follow(replica, "space", Mirror(made.prefix_index, place))
        replica.update(ReplicaReport(6e-5, {CPU: 1e-4}, 256, HELD + 20_000, HELD))
        for number, prefix in enumerate(prefixes):
            if number % replicas == place:
                made.prefix_index.store(place, GPU, prefix)
            elif number % 3 == 0:  # in host memory on some other replicas
                made.prefix_index.store(place, CPU, prefix)
        made.prefix_index.store(place, GPU, [draw.getrandbits(64) for _ in range(HELD)])
    owns = [tuple(draw.getrandbits(64) for _ in range(OWN)) for _ in range(2000)]
    prompts = [Prompt((PREFIX + OWN) * BLOCK, {"space": Keys(draw.choice(prefixes) + own, BLOCK)}) for own in owns]
    return made, prompts


def decisions(replicas: int, rate: float, seconds: float) -> dict[str, float]:
    """Return the milliseconds of `decide`, of all bookkeeping of a request, and of `decide` from when it was due."""
    draw = random.Random(1)
    made, prompts = fleet(replicas, draw)
    decided, whole, late, open_ = list[float](), list[float](), list[float](), list[Flight]()
    start = time.perf_counter()
    for number in range(int(rate * seconds)):
        due = start + number / rate
        if (early := due - time.perf_counter()) > 0:
            time.sleep(early)
        prompt, now = draw.choice(prompts), time.perf_counter()
        decision = made.decide(prompt, now)
        decided.append(time.perf_counter() - now)
        assert decision is not None
        made.count(prompt, decision)
        open_.append(made.send(prompt, decision, now))
        if len(open_) > OPEN:
            flight = open_.pop(0)
            made.begin(flight, now)
            made.end(flight, now, 100)
        whole.append(time.perf_counter() - now)
        late.append(now - due + decided[-1])
    reached = rate * seconds / (time.perf_counter() - start)
    return {"replicas": replicas, "requested_per_second": rate, "reached_per_second": reached,
            **{f"{name}_{label}_ms": at(times, share) for name, times in
               (("decide", decided), ("decide_from_due", late), ("all_books", whole))
               for label, share in (("p50", 0.5), ("p99", 0.99))}}


def at(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] * 1e3


# Over HTTP

ANSWER = b'{"id":"x","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"a",' \
         b'"finish_reason":"length"}],"usage":{"prompt_tokens":9,"completion_tokens":1}}'


class Answers(asyncio.Protocol):
    """A server with a constant answer; each connection has at most one request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.I)
        if not end or len(body) < (int(length[1]) if length else 0):
            return
        self._buffer = b""
        path = head.split(b" ", 2)[1]
        status, answer = (200, ANSWER) if path.startswith((b"/v1", b"/health")) else (404, b"{}")
        self._transport.write(b"HTTP/1.1 %d OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (
            status, len(answer)) + answer)


def serve(ports: Sequence[int], ready: Event) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            for port in ports:
                await stack.enter_async_context(await loop.create_server(Answers, "127.0.0.1", port))
            ready.set()
            await asyncio.Event().wait()

    asyncio.run(main())


async def load(url: str, connections: int, seconds: float, body: bytes) -> int:
    """Send requests without a pause on every connection; return the number of answers."""
    place, end, answered = urlsplit(url), time.perf_counter() + seconds, 0

    def sink(reply: Reply) -> Sink:
        assert reply.status == 200
        return lambda at, piece: None

    async def one() -> None:
        nonlocal answered
        connection = Connection(place.hostname or "", place.port or 80)
        while time.perf_counter() < end:
            await connection.exchange(Call("POST", "/v1/completions", body), sink)
            answered += 1
        await connection.close()

    await asyncio.gather(*(one() for _ in range(connections)))
    return answered


def over_http(replicas: int, prompt: Any, seconds: float) -> dict[str, float]:
    context = get_context("spawn")
    ports, ready = [free_port() for _ in range(replicas)], context.Event()
    servers = context.Process(target=serve, args=(ports, ready), daemon=True)
    servers.start()
    try:
        assert ready.wait(30)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        with ServerProcess(*urls, "--no-log-requests", command="router") as router:
            body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 1}).encode()
            asyncio.run(load(router.url, 16, 1.0, body))
            process = psutil.Process(router.pid)
            before, begun = process.cpu_times(), time.perf_counter()
            answered = asyncio.run(load(router.url, 16, seconds, body))
            after, taken = process.cpu_times(), time.perf_counter() - begun
            used = after.user + after.system - before.user - before.system
            with urllib.request.urlopen(router.url + "/metrics", timeout=10) as reply:
                p99 = bucket(reply.read().decode(), "spillover:router_decision_seconds", 0.99)
    finally:
        servers.kill()
        servers.join()
    return {"replicas": replicas, "body_bytes": len(body), "requests_per_second": answered / taken,
            "router_cpu_ms_a_request": used / answered * 1e3, "router_cpu_share": used / taken,
            "requests_per_second_of_a_core": answered / used, "decision_p99_at_most_ms": p99 * 1e3}


def bucket(text: str, name: str, share: float) -> float:
    """Return the upper bound of the histogram's bucket that this quantile is in."""
    found = [(float(bound), float(count)) for bound, count in re.findall(
        rf'^{name}_bucket{{le="([^"]+)"}} ([0-9.e+]+)$', text, re.M)]
    return next(bound for bound, count in found if count >= share * found[-1][1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=2000.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--output-json", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"decisions": [], "http": []}
    for replicas in (4, 16):
        row = decisions(replicas, arguments.rate, arguments.seconds)
        result["decisions"].append(row)
        print("{replicas} replicas at {reached_per_second:,.0f} of {requested_per_second:,.0f} decisions/s: decide "
              "{decide_p50_ms:.3f} ms p50, {decide_p99_ms:.3f} p99; from when it was due {decide_from_due_p99_ms:.3f} "
              "p99; with all bookkeeping {all_books_p50_ms:.3f} p50, {all_books_p99_ms:.3f} p99".format_map(row),
              flush=True)
    for prompt in ("Once upon a time " * 8, [7] * 7200):
        row = over_http(4, prompt, arguments.seconds)
        result["http"].append(row)
        print("over HTTP, bodies of {body_bytes:,} bytes: {requests_per_second:,.0f} requests per second with "
              "{router_cpu_share:.2f} cores of the router, {router_cpu_ms_a_request:.2f} ms of CPU time each; "
              "decisions within {decision_p99_at_most_ms:g} ms p99".format_map(row), flush=True)
    if arguments.output_json is not None:
        result |= provenance(asdict(probe())) | {"command": "python benchmarks/router_decisions.py"}
        arguments.output_json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
