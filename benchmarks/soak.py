"""Thousands of random requests, valid and invalid, at the same time: nothing may break, leak or grow.

    python benchmarks/soak.py --requests 10000 --load-format null --output-json soak.json
    python benchmarks/soak.py --requests 1000 --invalid 0.5          # the default model

Starts a `spill serve`. These conditions must hold: no 5xx; rejections have OpenAI's error format; every stream ends
with [DONE] or an error event; the server's own counters and log show no failure either; afterwards no request runs or
waits and no KV block is held; resident memory of front and engine does not grow after the first tenth of the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from request_shapes import Shape, Shapes
from server_process import HOST, ServerProcess, resident_nbytes

from spillover.bench.serving.http_client import Call, Connection, Reply
from spillover.bench.serving.sse import events

ALLOWED_GROWTH = (0.05, 10 << 20)  # a share of the earlier memory, plus bytes
ANSWER_SECONDS = 120  # a request without an answer after this time counts as stuck


@dataclass
class Findings:
    """Counts of what happened; `problems` must stay empty."""

    statuses: Counter[int] = field(default_factory=Counter)
    shapes: Counter[str] = field(default_factory=Counter)
    streams: int = 0
    streams_ended_by_error: int = 0
    hung_up: int = 0
    problems: list[str] = field(default_factory=list)
    rss: list[dict[str, float]] = field(default_factory=list)  # number of completed requests, MB of front and engine

    def problem(self, shape: Shape, what: str) -> None:
        body = (shape.call.body or b"")[:300].decode(errors="replace")
        self.problems.append(f"{shape.name}: {what} [{shape.call.method} {shape.call.path} {body}]")


async def soak(server: ServerProcess, shapes: Shapes, requests: int, concurrency: int, weigh: bool = True) -> Findings:
    """Send requests and return the findings; use `weigh=False` if the run is too short for memory to settle."""
    findings = Findings()
    left = iter(range(requests))
    done = 0
    every = max(1, requests // 20)

    async def worker() -> None:
        nonlocal done
        connection = Connection(HOST, server.port)
        for _ in left:
            await _one(connection, shapes.next(), findings)
            done += 1
            if weigh and done % every == 0:
                _weigh(server, findings, done)
        await connection.close()

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    findings.problems += await _leftovers(server) + await _own_count(server)
    if weigh:
        _weigh(server, findings, done)
        findings.problems += growth(findings.rss, warm=requests // 10)
    return findings


async def _one(connection: Connection, shape: Shape, findings: Findings) -> None:
    findings.shapes[shape.name.split("=")[0].split(" ")[0]] += 1
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await _exchange(connection, shape, findings)
    except TimeoutError:
        findings.problem(shape, f"no answer within {ANSWER_SECONDS} s")
        await connection.close()
    except (OSError, ValueError) as error:
        findings.problem(shape, f"the connection broke: {error!r}")
        await connection.close()


async def _exchange(connection: Connection, shape: Shape, findings: Findings) -> None:
    if shape.leave_after == 0:
        await connection.hang_up(shape.call, after=0.0 if shape.call.raw is None else 0.05)
        findings.hung_up += 1
        return
    reply = await connection.send(shape.call)
    findings.statuses[reply.status] += 1
    if reply.is_stream:
        await _stream(connection, reply, shape, findings)
    else:
        _check(shape, reply, await connection.read(reply), findings)


async def _stream(connection: Connection, reply: Reply, shape: Shape, findings: Findings) -> None:
    findings.streams += 1
    seen: list[bytes] = []
    async for data in events(connection.chunks(reply)):
        seen.append(data)
        if shape.leave_after is not None and len(seen) >= shape.leave_after:
            findings.hung_up += 1
            await connection.close()
            return
    if shape.expect == "refused":
        findings.problem(shape, "was answered with a stream")
    failed = any(b'"error"' in data and "message" in (json.loads(data).get("error") or {}) for data in seen[-2:])
    findings.streams_ended_by_error += failed
    if shape.call.path == "/v1/responses":
        if not any(b'"response.completed"' in data or b'"response.incomplete"' in data for data in seen[-2:]):
            findings.problem(shape, f"the stream ends with {seen[-1:]!r}")
        return
    if not failed and seen[-1:] != [b"[DONE]"]:
        findings.problem(shape, f"the stream ends with {seen[-1:]!r}")
    if not failed:
        findings.problems += [f"{shape.name}: {what}" for what in _unfinished(shape, seen)]


def _unfinished(shape: Shape, seen: list[bytes]) -> list[str]:
    """Return a problem if a choice that has begun does not have exactly one finish reason."""
    begun: set[int] = set()
    finished: Counter[int] = Counter()
    for data in seen:
        if data == b"[DONE]":
            continue
        for choice in json.loads(data).get("choices", []):
            begun.add(choice["index"])
            finished[choice["index"]] += choice.get("finish_reason") is not None
    wrong = [index for index in sorted(begun) if finished[index] != 1]
    return [f"choices {wrong} finish {[finished[index] for index in wrong]} times"] if wrong or not begun else []


def _check(shape: Shape, reply: Reply, body: bytes, findings: Findings) -> None:
    if reply.status >= 500:
        findings.problem(shape, f"{reply.status}: {body[:300]!r}")
    elif reply.status >= 400:
        if shape.expect == "answered":
            findings.problem(shape, f"was refused with {reply.status}: {body[:300]!r}")
        if shape.call.raw is None and not is_error(body):
            findings.problem(shape, f"{reply.status} is not in the error shape: {body[:200]!r}")
    elif shape.expect == "refused":
        findings.problem(shape, f"was answered with {reply.status}: {body[:200]!r}")


def is_error(body: bytes) -> bool:
    """Return whether a body has OpenAI's error format, with a message."""
    try:
        error = json.loads(body)["error"]
        return bool(error["message"]) and isinstance(error["type"], str) and {"param", "code"} <= error.keys()
    except (ValueError, KeyError, TypeError):
        return False


async def _leftovers(server: ServerProcess) -> list[str]:
    """Return what still runs, waits or holds blocks after all answers; the engine notices hang-ups only in a step."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    values: dict[str, float] = {}
    for _ in range(100):
        metrics = await _get(server, "/metrics")
        values = {name: total(metrics, f"spillover:{name}") for name in names}
        if not any(values.values()):
            return []
        await asyncio.sleep(0.1)
    return [f"afterwards {name} is {value}" for name, value in values.items() if value]


async def _own_count(server: ServerProcess) -> list[str]:
    """Return the failures that the server reports; those of clients that have disconnected are only visible there."""
    metrics = await _get(server, "/metrics")
    problems = [f"the server counts {line}" for line in metrics.splitlines()
                if line.startswith("spillover:http_requests_total{") and re.search(r'status="5\d\d"', line)
                and '"/health"' not in line]  # /health returns 503 until the engine is ready
    if (found := server.log.find("Traceback")) >= 0:
        problems.append(f"the server's log has a traceback:\n{server.log[found:found + 4000]}")
    return problems


async def _get(server: ServerProcess, path: str) -> str:
    connection = Connection(HOST, server.port)
    reply = await connection.send(Call("GET", path, headers=()))
    body = await connection.read(reply)
    await connection.close()
    return body.decode()


def total(metrics: str, name: str) -> float:
    """Return a metric summed over its labels; raise ValueError if it does not exist, instead of returning zero."""
    values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", metrics, re.MULTILINE)
    if not values:
        raise ValueError(f"/metrics has no {name}")
    return sum(map(float, values))


def _weigh(server: ServerProcess, findings: Findings, done: int) -> None:
    findings.rss.append({"requests": done, "front": resident_nbytes(psutil.Process(server.pid)) / 1e6,
                         "engine": resident_nbytes(server.engine()) / 1e6})


def growth(rss: list[dict[str, float]], warm: int) -> list[str]:
    """Return a problem for each process that has grown by more than is allowed since its warm-up."""
    first = next(sample for sample in rss if sample["requests"] >= warm)
    problems = []
    for process in ("front", "engine"):
        limit = first[process] * (1 + ALLOWED_GROWTH[0]) + ALLOWED_GROWTH[1] / 1e6
        if rss[-1][process] > limit:
            problems.append(f"the {process} grew from {first[process]:.0f} MB after {first['requests']:.0f} requests "
                            f"to {rss[-1][process]:.0f} MB (allowed: {limit:.0f} MB)")
    return problems


def summary(findings: Findings, seconds: float) -> dict[str, Any]:
    done = int(findings.rss[-1]["requests"])
    return {
        "requests": done,
        "seconds": round(seconds, 1),
        "requests_per_second": round(done / seconds, 1),
        "statuses": dict(sorted(findings.statuses.items())),
        "streams": findings.streams,
        "streams_ended_by_error": findings.streams_ended_by_error,
        "hung_up": findings.hung_up,
        "rss_mb": findings.rss,
        "shapes": dict(findings.shapes.most_common()),
        "problems": findings.problems,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model to serve; default: the default model")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--invalid", type=float, default=0.35, help="share of requests that must be refused")
    parser.add_argument("--max-tokens", type=int, default=24, help="maximum number of tokens of an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load-format", default="auto", help="null: a model that answers at once, without weights")
    parser.add_argument("--num-gpu-blocks-override", type=int, default=1024,
                        help="few enough that the prefix cache is full, and evicts, early in the run")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--output-json", type=Path)
    options = parser.parse_args()
    arguments = [*([options.model] if options.model else []), "--load-format", options.load_format,
                 "--num-gpu-blocks-override", str(options.num_gpu_blocks_override),
                 "--max-model-len", str(options.max_model_len)]
    shapes = Shapes(options.seed, max_model_len=options.max_model_len, max_tokens=options.max_tokens,
                    invalid=options.invalid)
    with ServerProcess(*arguments) as server:
        start = time.perf_counter()
        findings = asyncio.run(soak(server, shapes, options.requests, options.concurrency))
        result = summary(findings, time.perf_counter() - start)
    shown = {key: value for key, value in result.items() if key not in ("shapes", "rss_mb", "problems")}
    first, last = findings.rss[0], findings.rss[-1]
    print(json.dumps(shown, indent=2))
    print(f"memory: front {first['front']:.0f} -> {last['front']:.0f} MB, "
          f"engine {first['engine']:.0f} -> {last['engine']:.0f} MB")
    for problem in findings.problems[:40]:
        print(f"PROBLEM {problem}", file=sys.stderr)
    print(f"{len(findings.problems)} problems")
    if options.output_json is not None:
        from spillover.bench.provenance import provenance
        from spillover.plan.hardware import probe

        made = provenance(dataclasses.asdict(probe()))
        options.output_json.write_text(json.dumps(result | made, indent=2) + "\n")
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())
