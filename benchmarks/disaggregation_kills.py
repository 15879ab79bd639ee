"""Separate prefill and decode while one of the two servers, or the pool between them, is killed or stopped: checks that
answers stay the same and in time.

    python benchmarks/disaggregation_kills.py --rounds 100 --out benchmarks/results/disaggregation-kills.json

There is a server that computes prompts, one that decodes, a shared pool between them and a router in front
(`--disaggregation always`). Each round sends prompts that neither has cached (each round has a `cache_salt`) at once,
half of them as streams, and at a random moment of their transfer makes one fault: none; the pool's owner, a server or
only its engine is killed (SIGKILL); one of them is stopped (SIGSTOP) for up to 8 s; a server and the owner are killed.
Every answer is compared with a known one. A stream that ends with an error is requested again, and its time counts from
the first try. No answer may be wrong or missing, none may take 5 s longer than the slowest undisturbed one, and nothing
may be left behind. Exits with 1 otherwise.
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
import tempfile
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from host_pool_kills import left_behind
from host_pool_processes import SHAPES, OwnerProcess, vocabulary
from server_process import ServerProcess

from spillover.bench.provenance import provenance
from spillover.bench.serving.http_client import Call, Connection, Reply, Sink
from spillover.lab.engines.metrics_text import parse_metrics, total
from spillover.plan.hardware import probe

FAULTS = ("none", "owner", "prefill", "decode", "prefill engine", "decode engine", "owner stopped", "prefill stopped",
          "decode stopped", "prefill, owner", "decode, owner")
DECK = FAULTS + 2 * ("owner", "owner stopped", "prefill stopped", "decode stopped")  # these need no new server
LIMIT = 5.0  # maximum seconds that an answer may take longer than the slowest undisturbed one
TRIES = 4
OUTPUT = 8  # tokens of an answer
_NUMBERS = itertools.count()


def model_flags(model: str, folder: Path) -> list[str]:
    """Return the flags for a shape with random weights, or for a model in a folder; prompts are token ids."""
    if model not in SHAPES:
        return [model, "--skip-tokenizer-init"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[model]))
    return [str(folder), "--load-format", "dummy", "--skip-tokenizer-init"]


def engine(flags: list[str], pool: Path, environment: dict[str, str], folder: Path) -> ServerProcess:
    """Return a server that spills every full block to a shared pool and publishes KV events for a router, through
    sockets in a folder."""
    number = next(_NUMBERS)
    events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{folder}/events-{number}",
              "replay_endpoint": f"ipc://{folder}/replay-{number}"}
    return ServerProcess(*flags, "--host-pool", str(pool), "--spill", "eager", "--kv-events-config", json.dumps(events),
                         "--no-log-requests", environment=environment)


def router(servers: list[ServerProcess]) -> ServerProcess:
    """Return a router in front of `servers`, the first of them for prompts."""
    return ServerProcess(*(server.url for server in servers), "--disaggregation", "always", "--prefill-replicas", "1",
                         "--no-log-requests", command="router", ready_seconds=60)


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
    """One answer as its client observed it."""

    status: int = 0
    tokens: list[int] = field(default_factory=list)
    timings: dict[str, Any] = field(default_factory=dict)  # as reported by the server that decoded
    error: str = ""

    @property
    def fine(self) -> bool:
        return self.status == 200 and not self.error


async def ask(url: str, prompt: list[int], stream: bool, seconds: float, salt: str | None = None) -> Answer:
    """Request a completion of OUTPUT tokens; return within `seconds` in any case."""
    place = urlsplit(url)
    connection = Connection(place.hostname or "", place.port or 80)
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True,
                            "return_timings": True, "return_token_ids": True, "stream": stream}
    if salt is not None:
        body["cache_salt"] = salt
    answer = Answer()
    pieces: list[bytes] = []

    def sink(reply: Reply) -> Sink:
        answer.status = reply.status
        return lambda at, piece: pieces.append(piece)

    try:
        async with asyncio.timeout(seconds):
            await connection.exchange(Call("POST", "/v1/completions", json.dumps(body).encode()), sink)
    except (ConnectionError, asyncio.IncompleteReadError, TimeoutError, ValueError) as failure:
        answer.error = repr(failure)
    finally:
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


@dataclass
class Fleet:
    """The processes that faults are made in."""

    prefill: ServerProcess
    decode: ServerProcess
    owner: OwnerProcess
    routed: ServerProcess
    dead: set[str] = field(default_factory=set)
    engines: dict[str, int] = field(default_factory=dict)  # process ids of engines that were killed alone, by fault

    def server(self, name: str) -> ServerProcess:
        return self.prefill if name.startswith("prefill") else self.decode

    async def inject(self, fault: str, rng: random.Random) -> None:
        """Make one fault."""
        for name in fault.split(", "):
            if name == "owner":
                self.owner.kill()
                self.dead.add(name)
            elif name == "owner stopped":
                self.owner.signal(signal.SIGSTOP)
                await asyncio.sleep(rng.uniform(0.1, 8.0))
                self.owner.signal(signal.SIGCONT)
            elif name.endswith(" engine"):
                engine = self.server(name).engine()
                self.engines[name] = engine.pid
                engine.send_signal(signal.SIGKILL)
            elif name.endswith(" stopped"):
                signal_tree(self.server(name), signal.SIGSTOP)
                await asyncio.sleep(rng.uniform(0.1, 8.0))
                signal_tree(self.server(name), signal.SIGCONT)
            elif name != "none":
                signal_tree(self.server(name), signal.SIGKILL)
                self.dead.add(name)
            await asyncio.sleep(rng.random() * 0.05)

    def recover(self) -> None:
        """Restart what was killed, and wait until the router knows the blocks of all replicas."""
        if "owner" in self.dead:
            self.owner.start()
        for name in self.dead - {"owner"}:
            server = self.server(name)
            server.process.wait(10)
            server.launch()
            server.wait_until_ready()
        for name, killed in self.engines.items():  # their servers restart them
            server, deadline = self.server(name), time.monotonic() + 120
            while server.status() != 200 or not server.children() or server.engine().pid == killed:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the {name} did not come back:\n{server.log[-2000:]}")
                time.sleep(0.1)
        self.dead.clear()
        self.engines.clear()
        until_exact(self.routed, 120)


async def send_with_retries(url: str, prompt: list[int], stream: bool, salt: str,
                            timeout: float) -> tuple[Answer, float, int]:
    """Request until there is an answer; return it, the seconds since the first try, and the number of failed tries."""
    begun = time.perf_counter()
    failed_tries = 0
    while True:
        answer = await ask(url, prompt, stream, timeout, salt)
        if answer.fine or answer.status != 200 or failed_tries == TRIES:
            return answer, time.perf_counter() - begun, failed_tries
        failed_tries += 1


class Kills:
    def __init__(self, arguments: argparse.Namespace, fleet: Fleet, prompts: list[list[int]],
                 expected: list[list[int]]) -> None:
        self.arguments, self.fleet, self.prompts, self.expected = arguments, fleet, prompts, expected
        self.random = random.Random(arguments.seed)
        self.plain: list[float] = []  # seconds of each undisturbed answer
        self.waits: dict[str, list[float]] = {fault: [] for fault in FAULTS}
        self.sources: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()  # number of completed rounds by fault
        self.wrong: list[dict[str, Any]] = []

    async def round(self, number: int, fault: str) -> None:
        chosen = self.random.sample(range(len(self.prompts)), self.arguments.at_once)
        span = statistics.median(self.plain) if self.plain else 1.0
        requests = [asyncio.create_task(send_with_retries(self.fleet.routed.url, self.prompts[which], index % 2 == 0,
                                                          f"round-{number}", 60.0))
                    for index, which in enumerate(chosen)]
        if fault != "none":
            await asyncio.sleep(self.random.random() * span)
            await self.fleet.inject(fault, self.random)
        for which, (answer, seconds, failed_tries) in zip(chosen, await asyncio.gather(*requests), strict=True):
            self.counts["answers"] += 1
            self.counts["retried"] += failed_tries
            (self.plain if fault == "none" else self.waits[fault]).append(seconds)
            self.sources.update(answer.timings.get("tokens") or {})
            if not answer.fine or answer.tokens != self.expected[which]:
                self.counts["wrong" if answer.fine else "failed"] += 1
                self.wrong.append({"round": number, "fault": fault, "status": answer.status, "error": answer.error,
                                   "tokens": answer.tokens, "expected": self.expected[which]})
                print(self.wrong[-1], flush=True)

    def result(self) -> dict[str, Any]:
        most = max(self.plain, default=0.0)
        return {"rounds": self.faults.total(), "faults": dict(self.faults), "answers": self.counts["answers"],
                "wrong": self.counts["wrong"], "failed": self.counts["failed"],
                "retried": self.counts["retried"], "wrong_or_failed": self.wrong,
                "plain_seconds": {"median": statistics.median(self.plain) if self.plain else None, "most": most},
                "longest_seconds": {fault: max(waits) for fault, waits in self.waits.items() if waits},
                "longest_wait_beyond_plain": max((max(waits) - most for waits in self.waits.values() if waits),
                                                 default=0.0),
                "prompt_tokens_by_source": dict(self.sources)}


def metric(server: ServerProcess, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as page:
        return total(parse_metrics(page.read().decode()), name) or 0.0


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    rng, words = random.Random(arguments.seed), vocabulary(arguments.model)
    shm = set(os.listdir("/dev/shm"))
    prompts = [[rng.randrange(1, words) for _ in range(arguments.prompt)] for _ in range(arguments.prompts)]
    with tempfile.TemporaryDirectory(prefix="pd-") as name, ExitStack() as stack:
        folder = Path(name)
        length = arguments.prompt + OUTPUT + 24
        flags = [*model_flags(arguments.model, folder / "model"), "--device", "cpu", "--max-model-len", str(length),
                 "--max-num-seqs", "8", "--num-gpu-blocks-override", str(arguments.at_once * 3 * -(-length // 16)),
                 "--restore", "always"]
        environment = {"OMP_NUM_THREADS": "1"}
        with ServerProcess(*flags[:-2], "--no-log-requests", environment=environment) as plain:
            expected = [asyncio.run(ask(plain.url, prompt, False, 60.0)).tokens
                        for prompt in prompts]
        assert all(len(tokens) == OUTPUT for tokens in expected), "there is no answer to compare with"
        owner = OwnerProcess(arguments.memory << 20, folder)
        stack.callback(owner.kill)
        pair = [engine(flags, owner.socket, environment, folder) for _ in range(2)]
        started(stack, pair)
        routed = router(pair)
        started(stack, [routed])
        until_exact(routed)
        kills = Kills(arguments, Fleet(*pair, owner, routed), prompts, expected)
        asyncio.run(_rounds(arguments, kills, rng))
        result = kills.result()
        result["remote_prefills"] = metric(routed, "spillover:router_remote_prefills")
        result["in_flight_left"] = metric(routed, "spillover:router_in_flight")
        children = [process for server in pair for process in server.children()]
        for server in (routed, *pair):
            server.stop()
        result["processes_left"] = sum(process.is_running() and process.status() != "zombie" for process in children)
        result.update(left_behind(owner))
        result["socket_left"] = owner.socket.exists()
    result["shm_left"] = sorted(set(os.listdir("/dev/shm")) - shm)
    return result


async def _rounds(arguments: argparse.Namespace, kills: Kills, rng: random.Random) -> None:
    for number in range(3):  # warm-up, and how long undisturbed answers take
        await kills.round(-1 - number, "none")
    kills.plain = kills.plain[arguments.at_once:]
    plan: list[str] = []
    while len(plan) < arguments.rounds:
        plan += rng.sample(DECK, len(DECK))
    begun = time.monotonic()
    for number, fault in enumerate(plan[:arguments.rounds]):
        if time.monotonic() > arguments.deadline:
            print(f"--seconds {arguments.seconds:g} have passed after {number} rounds", flush=True)
            return
        await kills.round(number, fault)
        kills.faults[fault] += 1
        await asyncio.to_thread(kills.fleet.recover)
        longest = max(kills.waits[fault] or kills.plain)
        print(f"{number:3} {fault:16} {time.monotonic() - begun:6.1f} s, longest so far {longest:5.2f} s, wrong "
              f"{kills.counts['wrong']}, failed {kills.counts['failed']}, retried {kills.counts['retried']}",
              flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--model", default="small", help="small (random weights), or a folder")
    parser.add_argument("--prompts", type=int, default=12, help="number of prompts; answers are known beforehand")
    parser.add_argument("--prompt", type=int, default=321, help="tokens of each prompt")
    parser.add_argument("--at-once", type=int, default=4, help="requests per round")
    parser.add_argument("--memory", type=int, default=128, help="MiB of the pool")
    parser.add_argument("--seconds", type=float, default=3600.0, help="time from the start in which rounds may begin")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--append", action="store_true", help="add to the runs in --out; give another --seed")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exits through the cleanup of what was started
    begun = time.monotonic()
    arguments.deadline = begun + arguments.seconds
    result = provenance(asdict(probe())) | {
        "command": shlex.join(["python", "benchmarks/disaggregation_kills.py", *sys.argv[1:]]),
        **run(arguments), "seconds": time.monotonic() - begun}
    print(json.dumps({name: value for name, value in result.items() if name not in ("hardware", "versions")}, indent=2))
    if arguments.out is not None:
        before = json.loads(arguments.out.read_text())["runs"] if arguments.append and arguments.out.exists() else []
        runs = [*before, result]
        summed = {name: sum(each[name] for each in runs) for name in (
            "rounds", "answers", "wrong", "failed", "retried", "remote_prefills")}
        summed["longest_wait_beyond_plain"] = max(each["longest_wait_beyond_plain"] for each in runs)
        arguments.out.write_text(json.dumps(summed | {"runs": runs}, indent=2) + "\n")
    clean = not (result["wrong"] or result["failed"] or result["engines_left"] or result["bytes_held_by_nobody"]
                 or result["shm_left"] or result["socket_left"] or result["owner_exit_code"] or result["in_flight_left"]
                 or result["processes_left"])
    late = result["longest_wait_beyond_plain"] > LIMIT
    sys.exit(0 if clean and not late and result["prompt_tokens_by_source"].get("pool") else 1)


if __name__ == "__main__":
    main()
