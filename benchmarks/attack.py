"""Runs attacks that try to stall, bloat or take over a server, and watches /health and memory during each of them.

    python benchmarks/attack.py                                  # all attacks, on the default model
    python benchmarks/attack.py --only many-messages --only pipelined

Starts `spill serve` on a loopback address; each attack is bounded in count and time. An attack passes if /health
answered 99 of 100 probes within 100 ms while it ran (a separate process probes every 15 ms), memory returned to within
20% of its earlier value, no answer was a 5xx that the attack does not allow, and the attack's own checks hold. Exits
with 1 if an attack does not pass.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import psutil
from attacks import ATTACKS, Attack, Target
from server_process import HOST, ServerProcess, resident_nbytes

PROBE_SECONDS = 0.015
HEALTH_P99_SECONDS = 0.1
MEMORY_SHARE, MEMORY_BYTES = 0.2, 16 << 20  # memory may stay higher than before by the larger of the two
SAMPLE_SECONDS = 0.2  # seconds between two samples of memory
SETTLE_SECONDS = 20.0  # maximum time for memory to return to its earlier value


@dataclass
class Outcome:
    attack: str
    n: int = 0
    seconds: float = 0.0
    probes: int = 0
    health_p50_ms: float = 0.0
    health_p99_ms: float = 0.0
    health_max_ms: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)
    health_statuses: dict[str, int] = field(default_factory=dict)
    num_5xx: int = 0  # number of 5xx or missing answers that the attack does not allow
    rss_before_mb: float = 0.0
    rss_peak_mb: float = 0.0
    rss_after_mb: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.problems


def probe(port: int, pipe: Pipe) -> None:
    """Probe /health until the pipe has a message; then send the seconds of each probe and the number of each status."""
    import http.client

    times: list[float] = []
    statuses: Counter[int] = Counter()
    connection: http.client.HTTPConnection | None = None
    pipe.send("ready")
    while not pipe.poll():
        start = time.perf_counter()
        try:
            if connection is None:
                connection = http.client.HTTPConnection(HOST, port, timeout=30)
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            status = answer.status
            if answer.will_close:
                connection.close()
                connection = None
        except (OSError, http.client.HTTPException):
            # A server may close a kept connection at any time: a quick failure on one is retried and not counted.
            if connection is not None:
                connection.close()
            retried, connection = connection is not None, None
            if retried and time.perf_counter() - start < 1:
                continue
            status = 0
        times.append(time.perf_counter() - start)
        statuses[status] += 1
        time.sleep(max(0.0, PROBE_SECONDS - (time.perf_counter() - start)))
    pipe.send((times, dict(statuses)))


def memory(server: ServerProcess) -> tuple[int, int]:
    """Return the resident bytes of the front, and those of all processes of the server."""
    front = resident_nbytes(psutil.Process(server.pid))
    return front, front + sum(resident_nbytes(child) for child in server.children())


def run(attack: Attack, server: ServerProcess) -> Outcome:
    outcome = Outcome(attack.name)
    target = Target(server)
    before = memory(server)
    peak = before[1]
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    prober = multiprocessing.get_context("spawn").Process(target=probe, args=(server.port, theirs), daemon=True)
    prober.start()
    ours.recv()
    start = sampled_at = time.monotonic()
    try:
        for problem in attack.run(target):
            if problem:
                outcome.problems.append(problem)
            if time.monotonic() - sampled_at > SAMPLE_SECONDS:
                peak, sampled_at = max(peak, memory(server)[1]), time.monotonic()
    finally:
        outcome.seconds = time.monotonic() - start
        time.sleep(0.5)
        ours.send("stop")
        times, health = ours.recv() if ours.poll(60) else ([60.0], {0: 1})
        prober.join(10)
        prober.kill()
    peak = max(peak, memory(server)[1])
    after = _settled(server, before)
    _judge(outcome, attack, target, times, health)
    outcome.rss_before_mb, outcome.rss_peak_mb, outcome.rss_after_mb = (round(nbytes / 1e6, 1) for nbytes in (
        before[1], peak, after[1]))
    for name, was, now in zip(("the front", "all processes"), before, after, strict=True):
        if now > was + max(MEMORY_SHARE * was, MEMORY_BYTES):
            outcome.problems.append(f"memory of {name} went from {was / 1e6:.0f} to {now / 1e6:.0f} MB")
    return outcome


def _settled(server: ServerProcess, before: tuple[int, int]) -> tuple[int, int]:
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        now = memory(server)
        back = all(new <= was + max(MEMORY_SHARE * was, MEMORY_BYTES) for was, new in zip(before, now, strict=True))
        if back or time.monotonic() > deadline:
            return now
        time.sleep(0.5)


def _judge(outcome: Outcome, attack: Attack, target: Target, times: list[float], health: dict[int, int]) -> None:
    times = sorted(times)
    outcome.n = sum(target.statuses.values())
    outcome.probes = len(times)
    outcome.health_p50_ms = round(times[len(times) // 2] * 1e3, 1)
    outcome.health_p99_ms = round(times[min(len(times) - 1, int(len(times) * 0.99))] * 1e3, 1)
    outcome.health_max_ms = round(times[-1] * 1e3, 1)
    outcome.statuses = {str(status): count for status, count in sorted(target.statuses.items())}
    outcome.health_statuses = {str(status): count for status, count in sorted(health.items())}
    if outcome.health_p99_ms > HEALTH_P99_SECONDS * 1e3:
        outcome.problems.append(f"/health took {outcome.health_p99_ms:.0f} ms at the 99th percentile")
    outcome.num_5xx = sum(count for counts in (target.statuses, health) for status, count in counts.items()
                          if (status >= 500 or status == 0) and status not in attack.allowed)
    if outcome.num_5xx:
        outcome.problems.append(f"{outcome.num_5xx} answers were 5xx or none: {outcome.statuses}, /health "
                                f"{outcome.health_statuses}")


def warm_up(server: ServerProcess) -> None:
    """Send requests of several kinds and sizes, so that memory that is allocated once is not charged to an attack."""
    target = Target(server)
    for _ in range(3):
        target.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8})
        target.post("/v1/completions", {"prompt": "word " * 200_000, "max_tokens": 1})
        target.post("/v1/completions", {"prompt": [1] * 200_000, "max_tokens": 1})
        target.post("/tokenize", {"prompt": "word " * 100_000})
        target.post("/v1/completions", {"prompt": "1", "max_tokens": 2, "structured_outputs": {"choice": ["a", "b"]}})
    server.status("/metrics")


def table(outcomes: list[Outcome]) -> str:
    head = f"{'attack':22} {'n':>7} {'s':>6} {'/health p50':>11} {'p99':>7} {'max':>7} {'5xx':>4}   {'RSS MB':>18}  "
    lines = [head + "statuses"]
    for one in outcomes:
        memory_text = f"{one.rss_before_mb:.0f} {one.rss_peak_mb:.0f} {one.rss_after_mb:.0f}"
        statuses = " ".join(f"{status}:{count}" for status, count in one.statuses.items())
        lines.append(f"{one.attack:22} {one.n:7} {one.seconds:6.1f} {one.health_p50_ms:9.1f}ms "
                     f"{one.health_p99_ms:7.1f} {one.health_max_ms:7.1f} {one.num_5xx:4}   "
                     f"{memory_text:>18}  {statuses}  {'pass' if one.passed else 'FAIL'}")
        lines += [f"    {problem}" for problem in one.problems]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=sorted(ATTACKS), help="may be given more than once")
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("--flag", action="append", default=[], help="for spill serve, e.g. --flag=--load-format=null")
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    chosen = [ATTACKS[name] for name in options.only or ATTACKS]
    for flags in dict.fromkeys(attack.flags for attack in chosen):
        with ServerProcess("--max-model-len", "2048", *flags, *options.flag) as server:
            warm_up(server)
            for attack in (attack for attack in chosen if attack.flags == flags):
                print(f"{attack.name}: {attack.about}", flush=True)
                outcomes.append(run(attack, server))
                print(table(outcomes[-1:]).partition("\n")[2], flush=True)
            if "Traceback" in server.log:
                outcomes[-1].problems.append("the server's log has a traceback")
    print("\n" + table(outcomes))
    if options.output_json:
        from made_by import made_by

        rows = [dataclasses.asdict(outcome) | {"passed": outcome.passed} for outcome in outcomes]
        options.output_json.write_text(json.dumps(made_by() | {"attacks": rows}, indent=1) + "\n")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
