"""Compares another tree of this repository with this one on a CPU: two engines run at the same time and take turns.

    git worktree add ../old fab2a91
    python benchmarks/old_against_new.py ../old --output benchmarks/results/old-against-new-cpu.json

The order is drawn at random for each load, and both engines get the same prompts; their tokens must be equal. A ratio
is the time of this tree divided by that of the other: below 1 this tree is faster.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from made_by import made_by

from spillover import LLM, SamplingParams
from spillover.bench.statistics import median_interval, paired_ratio

HERE = Path(__file__).resolve().parent.parent
# Number of requests, ranges of prompt tokens and of output tokens, and runs per round.
LOADS: dict[str, tuple[int, tuple[int, int], tuple[int, int], int]] = {
    "latency: one request of 256 and 64 tokens": (1, (256, 256), (64, 64), 2),
    "throughput: 32 requests of 32 to 256 and 16 to 96 tokens, 16 at once": (32, (32, 256), (16, 96), 1),
    "prefill of 256 tokens": (1, (256, 256), (1, 1), 2),
    "decode of 16 requests of 64 tokens": (16, (16, 16), (64, 64), 1),
}


def work() -> None:
    """For each line of standard input, a name and a seed, run that load and print its seconds and all tokens."""
    with LLM(device="cpu", gpu_memory="4GB", max_model_len=1024, max_num_seqs=16) as llm:
        for line in sys.stdin:
            name, seed = json.loads(line)
            count, prompt, answer, _ = LOADS[name]
            rng = random.Random(seed)
            prompts = [{"prompt_token_ids": [rng.randrange(100, 5000) for _ in range(rng.randint(*prompt))]}
                       for _ in range(count)]
            params = [SamplingParams(temperature=0, max_tokens=rng.randint(*answer), ignore_eos=True) for _ in prompts]
            llm.reset_prefix_cache()
            begun = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - begun
            print(json.dumps([seconds, [list(one.outputs[0].token_ids) for one in outputs]]), flush=True)


class Engine:
    """An engine in a separate process, which imports the package of a tree."""

    def __init__(self, stack: ExitStack, tree: Path) -> None:
        self._process = stack.enter_context(subprocess.Popen(
            [sys.executable, __file__, "--work", str(tree)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(tree / "src")}))
        stack.callback(self._process.kill)

    def run(self, name: str, seed: int) -> tuple[float, list[list[int]]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([name, seed]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException("an engine exited; its output is above")
        seconds, tokens = json.loads(line)
        return seconds, tokens


def summary(name: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return the medians, and the ratio of pairs: its median, and its mean with an interval."""
    ratios = [new / old for new, old in zip(seconds["new"], seconds["old"], strict=True)]
    return {"load": name, "median_ratio": median_interval(ratios).as_dict(),
            "mean_ratio": paired_ratio(seconds["new"], seconds["old"]).as_dict(), "seconds": seconds}


@click.command()
@click.argument("tree", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--rounds", default=30, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--output", default=None, type=click.Path(path_type=Path))
@click.option("--work", "works", is_flag=True, hidden=True)
def main(tree: Path, rounds: int, seed: int, output: Path | None, works: bool) -> None:
    if works:
        work()
        return
    rng = random.Random(seed)
    times: dict[str, dict[str, list[float]]] = {name: {"old": [], "new": []} for name in LOADS}
    with ExitStack() as stack:
        engines = {"old": Engine(stack, tree.resolve()), "new": Engine(stack, HERE)}
        for turn in range(-1, rounds):  # the first is a warm-up
            for name in [name for name, load in LOADS.items() for _ in range(load[-1])]:
                one, answers = rng.randrange(1 << 30), []
                for who in rng.sample(sorted(engines), 2):
                    seconds, tokens = engines[who].run(name, one)
                    answers.append(tokens)
                    if turn >= 0:
                        times[name][who].append(seconds)
                if answers[0] != answers[1]:
                    raise click.ClickException(f"the two trees gave different tokens: {name}, seed {one}")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, capture_output=True, text=True, check=True)
    loads = [summary(name, seconds) for name, seconds in times.items()]
    for load in loads:
        found = load["median_ratio"]
        reach = f"({found['low']:.3f} .. {found['high']:.3f})"
        click.echo(f"{load['load']}: {found['median']:.3f} of the other tree's time {reach}")
    if output is not None:
        output.write_text(json.dumps({**made_by(), "old": head.stdout.strip(), "loads": loads}, indent=1) + "\n")


if __name__ == "__main__":
    main()
