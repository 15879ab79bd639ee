"""Separate prefill and decode compared with one engine with chunked prefill: time to the first token and between
tokens, by prompt length, and the cost of moving the prompt's KV.

    python benchmarks/disaggregation.py --model long --seconds 800 --out benchmarks/results/disaggregation-cpu.json
    python benchmarks/disaggregation.py --model smollm2 --lengths 128,512,2048 --streams 2 --seconds 600
    python benchmarks/disaggregation.py --device cuda --model qwen3-0.6b --out qwen3.json       # random weights
    python benchmarks/disaggregation.py --device cuda --model llama-3.1-8b --out llama.json     # random weights

Arms: `one`, one engine that computes prompts in chunks in the same steps as its decodes; `two`, two engines behind a
router, each for both phases; `always`, the same two, the first computing every prompt of at least four new blocks and
the second decoding; `auto`, likewise if the predicted wait is shorter. Streams decode all the time (`--streams`), and
prompts are sent one at a time; a stream's gap counts as `during` if it overlaps the time from sending a prompt to its
first token, otherwise as `alone`. On one GPU two engines share it, by time slices or by MPS (`--mps`): this measures
the cost of moving KV and how much of a prompt's disturbance remains, not the gain of a second GPU. On a CPU each of the
two has half of the cores, `one` all. Results are written after each measurement; none begins after `--seconds`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from disaggregation_fleet import (
    BLOCK,
    Answer,
    ask,
    engine,
    model_flags,
    router,
    shape_of,
    started,
    until_exact,
    vocabulary,
)
from host_pool_processes import OwnerProcess
from server_process import ServerProcess

from spillover.bench.provenance import provenance
from spillover.cli.bench.redis_server import find_server, measure_remote, run_server
from spillover.plan.hardware import probe
from spillover.plan.measure import measure_link, measure_pool

ARMS = ("one", "two", "always", "auto")
GPU_MEMORY = {"qwen3-0.6b": "14GB", "llama-3.1-8b": "34GB"}
STREAM_PROMPT = 32  # tokens: two blocks, too few for a separate prefill
MOST_SECONDS = 120.0  # timeout of one answer
PAUSE = 0.3  # seconds between prompts, during which only the streams run


@dataclass
class Stream:
    """A client that requests long answers one after the other."""

    times: list[list[float]] = field(default_factory=list)  # arrival times of tokens, for each answer
    failed: int = 0

    def gaps(self) -> Iterator[tuple[float, float]]:
        """Yield the start and end of each gap between two tokens of an answer."""
        for times in self.times:
            yield from pairwise(times)


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.begun = time.perf_counter()
        self.random = random.Random(arguments.seed)
        self.words = vocabulary(arguments.model)
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.result: dict[str, Any] = {}

    @property
    def seconds_left(self) -> float:
        return self.arguments.seconds - (time.perf_counter() - self.begun)

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.begun:6.1f} s] {text}", flush=True)

    def prompt(self, tokens: int) -> list[int]:
        return [self.random.randrange(1, self.words) for _ in range(tokens)]

    # One arm at one length

    async def measure(self, arm: str, url: str, length: int) -> None:
        """Send prompts of one length, one at a time, while streams decode."""
        streams = [Stream() for _ in range(self.arguments.streams)]
        stop = asyncio.Event()
        background = [asyncio.create_task(self._stream(url, stream, stop)) for stream in streams]
        answers: list[Answer] = []
        try:
            await self._wait_until_decoding(streams)
            for _ in range(self.arguments.repeats):
                await asyncio.sleep(PAUSE)
                answers.append(await ask(url, self.prompt(length), self.arguments.output, self._timeout()))
            await asyncio.sleep(PAUSE)
        finally:
            stop.set()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
        self._add_row(arm, length, answers, streams)

    async def _stream(self, url: str, stream: Stream, stop: asyncio.Event) -> None:
        while not stop.is_set():
            times: list[float] = []
            stream.times.append(times)
            answer = await ask(url, self.prompt(STREAM_PROMPT), self.arguments.stream_output, self._timeout(),
                               into=times)
            if not answer.fine:
                stream.failed += 1
                await asyncio.sleep(0.1)

    async def _wait_until_decoding(self, streams: Sequence[Stream]) -> None:
        """Wait until every stream has received tokens."""
        deadline = time.perf_counter() + min(30.0, self._timeout())
        while not all(stream.times and len(stream.times[0]) > 2 for stream in streams):
            if time.perf_counter() > deadline:
                raise TimeoutError("the streams did not begin to decode")
            await asyncio.sleep(0.01)

    def _timeout(self) -> float:
        return max(5.0, min(MOST_SECONDS, self.seconds_left + 10.0))

    def _add_row(self, arm: str, length: int, answers: Sequence[Answer], streams: Sequence[Stream]) -> None:
        overlapping: list[list[float]] = [[] for _ in answers]  # for each prompt, the gaps that overlap its TTFT
        alone: list[float] = []
        for begun, ended in (gap for stream in streams for gap in stream.gaps()):
            hit = [place for place, answer in enumerate(answers)
                   if answer.times and begun < answer.times[0] and ended > answer.sent]
            for gaps in [overlapping[place] for place in hit] or [alone]:
                gaps.append(ended - begun)
        during = [gap for gaps in overlapping for gap in gaps]
        self.rows.append({
            "arm": arm, "prompt_tokens": length, "streams": len(streams),
            "requests": [{"ttft": answer.ttft if answer.times else None, "gaps": answer.gaps,
                          "timings": answer.timings, "error": answer.error, "stream_gaps": spread(gaps)}
                         for answer, gaps in zip(answers, overlapping, strict=True)],
            "stream_failures": sum(stream.failed for stream in streams), "stream_gaps_alone": spread(alone)})
        fine = [answer for answer in answers if answer.fine and answer.times]
        summary = {"failed": len(answers) - len(fine), "stream_itl_during_ms": milliseconds(during),
                   "stream_itl_alone_ms": milliseconds(alone)}
        self.rows[-1]["summary"] = summary
        if fine:
            own = [gap for answer in fine for gap in answer.gaps]
            summary |= {"ttft_ms": 1e3 * statistics.median(answer.ttft for answer in fine), "itl_ms": milliseconds(own),
                        "transfer": self._transfer(fine)}
        moved = summary.get("transfer") or {}
        self.say(f"{arm:7}{length:7,} tokens: TTFT {summary.get('ttft_ms', float('nan')):9.1f} ms, streams' gaps p50 "
                 f"{summary['stream_itl_during_ms']['p50']:7.1f} p99 {summary['stream_itl_during_ms']['p99']:7.1f} ms "
                 f"(alone {summary['stream_itl_alone_ms']['p50']:.1f}), "
                 f"brought {moved.get('tokens', 0):,} tokens in {moved.get('restore_ms', 0):.1f} ms, "
                 f"{summary['failed']} failed")
        self.write()

    def _transfer(self, answers: Sequence[Answer]) -> dict[str, Any] | None:
        """Return the KV that the decoding engine restored, and its rate in percent of the link's and the store's."""
        timings = [answer.timings for answer in answers if answer.timings.get("tokens")]
        if not timings:
            return None
        tokens = statistics.median(each["tokens"][self.arguments.store] for each in timings)
        moved = {"tokens": tokens, "computed_tokens": statistics.median(each["tokens"]["computed"] for each in timings),
                 "queue_ms": 1e3 * statistics.median(each["queue"] for each in timings),
                 "restore_ms": 1e3 * statistics.median(each["restore"] for each in timings),
                 "prefill_ms": 1e3 * statistics.median(each["prefill"] for each in timings)}
        if tokens and moved["restore_ms"]:
            nbytes = tokens / BLOCK * self.result["block_bytes"]
            rate = nbytes / (moved["restore_ms"] / 1e3)
            moved |= {"bytes": nbytes, "bytes_per_second": rate,
                      "link_ms": 1e3 * nbytes / self.result["link"]["to_device"],
                      "percent_of_link": 100 * rate / self.result["link"]["to_device"],
                      "percent_of_store": 100 * rate / self.result["store"]["to_device"]}
        return moved

    # The whole run

    async def run(self, arms: dict[str, str]) -> None:
        lengths = sorted({BLOCK * 8, *self.arguments.lengths})
        for arm, url in arms.items():  # warm-up: kernels of every length and the pool's pages
            for length in lengths:
                answer = await ask(url, self.prompt(length), 2, max(30.0, min(MOST_SECONDS, self.seconds_left)))
                if not answer.fine:
                    self.notes.append(f"warming {arm} at {length}: {answer.error}")
                    self.say(self.notes[-1])
        self.say("warm")
        await self._same_tokens(arms)
        done = 0
        for place, length in enumerate(self.arguments.lengths):
            for arm in list(arms) if place % 2 == 0 else list(arms)[::-1]:
                if self.seconds_left < 5:
                    self.notes.append(f"stopped by --seconds before {arm} at {length} tokens")
                    self.say(self.notes[-1])
                    return
                try:
                    await self.measure(arm, arms[arm], length)
                    done += 1
                except TimeoutError as error:
                    self.notes.append(f"{arm} at {length} tokens: {error}")
                    self.say(self.notes[-1])
        self.result["complete"] = done == len(arms) * len(self.arguments.lengths) and not self.notes

    async def _same_tokens(self, arms: dict[str, str]) -> None:
        """Compare the tokens of all arms for the same prompts, without streams."""
        length = sorted(self.arguments.lengths)[len(self.arguments.lengths) // 2]
        answered_tokens = []
        for _ in range(2):
            prompt = self.prompt(length)
            answers = [await ask(url, prompt, self.arguments.output, self._timeout(), stream=False, ids=True)
                       for url in arms.values()]
            answered_tokens.append([answer.tokens for answer in answers])
        self.result["same_tokens"] = all(tokens == each[0] and len(tokens) == self.arguments.output
                                         for each in answered_tokens for tokens in each)
        self.say(f"same tokens in every arm: {self.result['same_tokens']}")

    def write(self) -> None:
        self.result |= {"table": table(self.rows), "rows": self.rows, "notes": self.notes,
                        "seconds": time.perf_counter() - self.begun}
        if self.arguments.out is not None:
            self.arguments.out.write_text(json.dumps(without_nan(self.result), indent=1) + "\n")


def without_nan(value: Any) -> Any:
    """Replace NaN by null: JSON has no NaN."""
    if isinstance(value, dict):
        return {name: without_nan(each) for name, each in value.items()}
    if isinstance(value, list):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def milliseconds(gaps: Sequence[float]) -> dict[str, float]:
    return {name: 1e3 * value for name, value in spread(gaps).items() if name != "count"}


def spread(gaps: Sequence[float]) -> dict[str, float]:
    ordered = sorted(gaps)
    if not ordered:
        return {"count": 0, "p50": float("nan"), "p99": float("nan"), "most": float("nan")}
    return {"count": len(ordered), "p50": statistics.median(ordered), "p99": ordered[int(0.99 * (len(ordered) - 1))],
            "most": ordered[-1]}


def table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per arm and length; ratios are `one` over the arm, so an arm below 1 is worse than `one`."""
    base = {row["prompt_tokens"]: row["summary"] for row in rows if row["arm"] == "one"}
    made = []
    for row in rows:
        summary, one = row["summary"], base.get(row["prompt_tokens"])
        entry: dict[str, Any] = {"arm": row["arm"], "prompt_tokens": row["prompt_tokens"],
                                 "ttft_ms": summary.get("ttft_ms"), "itl_ms": summary.get("itl_ms", {}).get("p50"),
                                 **{f"stream_itl_{name}_ms": summary["stream_itl_during_ms"][name]
                                    for name in ("p50", "p99", "most")},
                                 "stream_itl_alone_ms": summary["stream_itl_alone_ms"]["p50"],
                                 "failed": summary["failed"]}
        moved = summary.get("transfer") or {}
        entry |= {name: moved.get(name) for name in ("tokens", "bytes", "restore_ms", "link_ms", "percent_of_link")}
        if one is not None and entry["ttft_ms"] and one.get("ttft_ms"):
            entry |= {"ttft_ratio": one["ttft_ms"] / entry["ttft_ms"], "stream_p99_ratio":
                      one["stream_itl_during_ms"]["p99"] / (entry["stream_itl_p99_ms"] or float("nan"))}
        made.append(entry)
    return made


@contextmanager
def mps(wanted: bool, folder: Path) -> Iterator[dict[str, str]]:
    """Run NVIDIA's MPS, which lets two processes compute on one GPU at the same time, within this context."""
    if not wanted:
        yield {}
        return
    places = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "mps-log")}
    for place in places.values():
        Path(place).mkdir()
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, timeout=20, env=os.environ | places)
    try:
        yield places
    finally:
        with suppress(subprocess.SubprocessError, OSError):
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", timeout=20, check=False,
                           env=os.environ | places)


def serve(bench: Bench, stack: ExitStack, folder: Path) -> dict[str, str]:
    """Start the servers that the arms need, all at once; return their addresses by arm."""
    arguments = bench.arguments
    longest = max(arguments.lengths) + arguments.output
    flags = [*model_flags(arguments.model, folder / "model"), "--device", arguments.device, "--max-model-len",
             str(max(longest, STREAM_PROMPT + arguments.stream_output) + BLOCK), "--max-num-seqs",
             str(arguments.streams + 4), "--block-size", str(BLOCK)]
    halves: dict[str, str] = {}
    if arguments.device == "cuda":
        flags += ["--gpu-memory", arguments.gpu_memory or GPU_MEMORY.get(arguments.model, "20GB")]
    else:
        cores = len(os.sched_getaffinity(0))
        halves = {"OMP_NUM_THREADS": str(max(1, cores // 2))}
        flags += ["--num-gpu-blocks-override", str(4 * longest // BLOCK + arguments.streams * (
            STREAM_PROMPT + arguments.stream_output) // BLOCK + 16)]
    flags += arguments.flag
    shared = stack.enter_context(mps(arguments.mps, folder))
    arms: dict[str, str] = {}
    ready = min(300.0, max(60.0, arguments.seconds))
    if "one" in arguments.arms:
        one = ServerProcess(*flags, "--no-log-requests", ready_seconds=ready, environment=shared)
        started(stack, [one])  # before the others: it may compile kernels that all need
        arms["one"] = one.url
        bench.say("one engine is up")
    if set(arguments.arms) - {"one"}:
        if arguments.store == "pool":
            owner = OwnerProcess(arguments.store_memory << 20, folder)
            stack.callback(owner.stop)
            store = ["--host-pool", str(owner.socket)]
        else:
            store = ["--remote", stack.enter_context(run_server(_redis(), arguments.store_memory << 20))]
            bench.result["store"] = dict(zip(("to_host", "to_device"), measure_remote(
                store[1], bench.result["block_bytes"]), strict=True))
        pair = [engine(flags, store, halves | shared, ready, folder) for _ in range(2)]
        started(stack, pair)
        bench.say("two engines and their store are up")
        routers = {arm: router(pair, "never" if arm == "two" else arm) for arm in arguments.arms if arm != "one"}
        started(stack, list(routers.values()))
        for arm, routed in routers.items():
            until_exact(routed)
            arms[arm] = routed.url
        bench.say("routers are up")
    return {arm: arms[arm] for arm in arguments.arms}


def _redis() -> str:
    found = find_server()
    if found is None:
        sys.exit("--store remote needs valkey-server or redis-server on the PATH")
    return found


def block_bytes(model: str, device: str) -> int:
    """Return the bytes of a block's KV on the device."""
    shape = shape_of(model)
    head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    width = 2 if device == "cuda" else 4
    return int(2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head * width * BLOCK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small",
                        help="small, long (40,960 positions), qwen3-0.6b, llama-3.1-8b or another of gpu_workload.py "
                        "(random weights); smollm2, the default model; or a folder")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--arms", default=",".join(ARMS), type=lambda text: text.split(","))
    parser.add_argument("--lengths", default="128,512,2048,8192,32768",
                        type=lambda text: [int(each) for each in text.split(",")])
    parser.add_argument("--streams", type=int, default=8, help="number of streams, which decode all the time")
    parser.add_argument("--stream-output", type=int, default=1024, help="tokens of each answer of a stream")
    parser.add_argument("--output", type=int, default=16, help="tokens of an answer to a prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--store", default="pool", choices=["pool", "remote"], help="holds KV between engines: a "
                        "shared pool, or a Valkey or Redis server as between machines")
    parser.add_argument("--store-memory", type=int, default=8192, help="MiB of the store")
    parser.add_argument("--gpu-memory", help="GPU memory of each engine; default: by the model")
    parser.add_argument("--flag", action="append", default=[], help="additional flag of every engine, such as "
                        "--flag=--max-num-batched-tokens=512")
    parser.add_argument("--mps", action="store_true", help="share the GPU by MPS instead of time slices")
    parser.add_argument("--seconds", type=float, default=170.0, help="time limit of the whole run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--markdown", type=Path, metavar="FILE",
                        help="measure nothing: print the table of a result, with marks for doc_numbers.py")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exits through the cleanup of what was started
    if arguments.markdown is not None:
        print_markdown(arguments.markdown)
        return
    unknown = set(arguments.arms) - set(ARMS)
    if unknown:
        sys.exit(f"--arms knows {', '.join(ARMS)}; got {', '.join(sorted(unknown))}")
    bench = Bench(arguments)
    nbytes = block_bytes(arguments.model, arguments.device)
    machine = probe()
    bench.result = provenance(asdict(machine)) | {
        "command": shlex.join(["python", "benchmarks/disaggregation.py", *sys.argv[1:]]), "complete": False,
        "label": label(arguments), "block_bytes": nbytes,
        "arguments": {name: value for name, value in vars(arguments).items() if name != "out"},
        "link": asdict(measure_link(arguments.device, nbytes)), "store": asdict(measure_pool(arguments.device, nbytes))}
    bench.say(f"{bench.result['label']}; link {bench.result['link']['to_device'] / 1e9:.1f} GB/s to the device, "
              f"memory of a pool {bench.result['store']['to_device'] / 1e9:.1f} GB/s, {nbytes:,} bytes a block")
    bench.write()
    try:
        with tempfile.TemporaryDirectory(prefix="pd-") as name, ExitStack() as stack:
            asyncio.run(bench.run(serve(bench, stack, Path(name))))
    except (RuntimeError, TimeoutError, subprocess.SubprocessError, OSError) as error:
        bench.notes.append(f"{type(error).__name__}: {error}"[:4000])
        bench.say(bench.notes[-1])
    finally:
        bench.write()
    print_table(bench.result["table"])
    sys.exit(0 if bench.result["complete"] and bench.result.get("same_tokens") else 1)


def label(arguments: argparse.Namespace) -> str:
    """Describe how the engines share the machine, as a title of the table."""
    if arguments.device == "cpu":
        own = arguments.model == "smollm2"
        weights = "the default model" if own else f"random weights of the shape {arguments.model}"
        return f"CPU, {weights}: one engine has all cores, of two each has half"
    shared = "MPS" if arguments.mps else "time slices"
    return f"two engines on one card, shared by {shared}; random weights of the model's true shape"


def print_markdown(path: Path) -> None:
    """Print a table of TTFT and of streams' p99 gaps by length and arm, and of the KV moved; each number is marked with
    its path in the file."""
    rows = json.loads(path.read_text())["table"]
    arms = list(dict.fromkeys(row["arm"] for row in rows))

    def cell(arm: str, length: int, name: str, form: str, factor: float = 1.0) -> str:
        place = next((place for place, row in enumerate(rows) if row["arm"] == arm and row["prompt_tokens"] == length
                      and row.get(name) is not None), None)
        if place is None:
            return "-"
        times = "" if factor == 1.0 else f"*{factor:g}"
        return f"{rows[place][name] * factor:{form}}<!--{path.name} table[{place}].{name}{times} {form}-->"

    columns = [*(f"TTFT {arm}" for arm in arms), *(f"p99 {arm}" for arm in arms), "moved", "in", "the link's time"]
    print(f"| prompt | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for length in sorted({row["prompt_tokens"] for row in rows}):
        cells = [*(f"{cell(arm, length, 'ttft_ms', ',.1f')} ms" for arm in arms),
                 *(f"{cell(arm, length, 'stream_itl_p99_ms', ',.1f')} ms" for arm in arms),
                 f"{cell('always', length, 'bytes', ',.1f', 1e-6)} MB",
                 *(f"{cell('always', length, name, ',.1f')} ms" for name in ("restore_ms", "link_ms"))]
        print(f"| {length:,} | {' | '.join(cells)} |")


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'arm':8}{'prompt':>8}{'TTFT ms':>10}{'x':>6}{'gap p50':>9}{'p99':>9}{'most':>9}{'x':>6}{'moved MB':>10}"
          f"{'in ms':>8}{'link ms':>9}")
    for row in rows:
        def shown(name: str, width: int, digits: int = 1, scale: float = 1.0, row: dict[str, Any] = row) -> str:
            value = row.get(name)
            return " " * (width - 1) + "-" if value is None else f"{value * scale:{width}.{digits}f}"

        print(f"{row['arm']:8}{row['prompt_tokens']:8,}{shown('ttft_ms', 10)}{shown('ttft_ratio', 6, 2)}"
              f"{shown('stream_itl_p50_ms', 9)}{shown('stream_itl_p99_ms', 9)}{shown('stream_itl_most_ms', 9)}"
              f"{shown('stream_p99_ratio', 6, 2)}{shown('bytes', 10, 1, 1e-6)}{shown('restore_ms', 8)}"
              f"{shown('link_ms', 9)}")


if __name__ == "__main__":
    main()
