"""Breakdown of a step's time, for three workloads, part by part with its limit; random weights of the true shapes.

    python benchmarks/where_time_goes.py --output results
    python benchmarks/where_time_goes.py --only qwen3-0.6b

W1's steps, and one request of Qwen3-0.6B and of gpt-oss-120b: the tables of `spill bench latency --profile` for each,
and for W1 as a whole the time of steps with prefill, of full batches and of the tail of the batch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
from gpu_workload import MODELS, RESULTS, opened, origin, run
from rich.console import Console

from spillover import LLM
from spillover.cli.bench.targets import RooflineLimits
from spillover.cli.profiling import PREFILLS, as_dict, host_table, kernels_table, part_bounds, parts_table
from spillover.engine.profiling.host_clock import HostStep, host_clock
from spillover.engine.profiling.step_profile import profile_steps
from spillover.models.registry import architecture
from spillover.plan.measure import measure_rates
from spillover.plan.part_limits import PartLimits
from spillover.plan.rates import Rates
from spillover.plan.roofline import Roofline
from spillover.plan.shapes import model_shape

TAIL = 0.9  # share of W1's requests; steps that decode fewer are its tail


@dataclass(frozen=True)
class Load:
    model: str
    requests: int
    input_len: int
    output_len: int
    temperature: float = 0.0
    block_size: int = 16
    whole: bool = False  # also run W1 from start to end


LOADS = {
    "w1": Load("qwen3-0.6b", 256, 562, 64, 0.6, 64, whole=True),
    "qwen3-0.6b": Load("qwen3-0.6b", 1, 512, 64),
    "gpt-oss-120b": Load("gpt-oss-120b", 1, 512, 48),
}


def profile(name: str, load: Load, rates: Rates, console: Console, flags: dict[str, Any]) -> dict[str, Any]:
    built = architecture(MODELS[load.model])
    config = built.config(MODELS[load.model])
    specs = built.weight_specs(config)
    shape = model_shape(config, specs, "bfloat16")
    limits, parts = RooflineLimits(Roofline(shape, rates)), PartLimits(config, specs, "bfloat16")
    rng, found = random.Random(1), {}
    with opened(load.model, gpu_memory=str(shape.weight_bytes + (50 << 30)), max_num_seqs=load.requests,
                max_model_len=2048, block_size=load.block_size, enable_prefix_caching=False, **flags) as llm:
        generate = partial(_generate, llm, load, rng)
        for _ in range(3):  # compiles kernels, and captures graphs of prefill steps
            generate(3)
        lengths = [*[1] * (PREFILLS - 1), load.output_len]
        for phase, steps in profile_steps(llm.engine, "cuda", lambda: [generate(length) for length in lengths],
                                          lambda: generate(3)).items():
            bounds = part_bounds(steps, parts, limits)
            console.print(parts_table(steps, bounds, f"{name}: a {phase} step"), host_table(steps),
                          kernels_table(steps), sep="\n")
            found[phase] = as_dict(steps, bounds)
        if load.whole:
            found["whole"] = whole(llm, load, limits)
            console.print_json(json.dumps(found["whole"]))
    return found


def _generate(llm: LLM, load: Load, rng: random.Random, output_len: int) -> None:
    prompts = [[rng.randint(0, 10000) for _ in range(load.input_len)] for _ in range(load.requests)]
    run(llm, prompts, [output_len] * load.requests, load.temperature)


def whole(llm: LLM, load: Load, limits: RooflineLimits) -> dict[str, Any]:
    """Run W1 without the profiler; return the times of its second run, as the first compiles and captures."""
    for _ in range(2):
        rng = random.Random(0)
        prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(load.requests)]
        with host_clock(llm.engine) as steps:
            run(llm, prompts, [rng.randint(100, 1024) for _ in prompts], load.temperature)
    full = TAIL * load.requests
    kinds = {
        "with prefill": [step for step in steps if step.has_prefill],
        "full batch": [step for step in steps if not step.has_prefill and len(step.batch) >= full],
        "tail of the batch": [step for step in steps if not step.has_prefill and len(step.batch) < full],
    }
    return {kind: _summary(listed, limits) for kind, listed in kinds.items() if listed}


def _summary(steps: Sequence[HostStep], limits: RooflineLimits) -> dict[str, float]:
    seconds, least = sum(step.total_seconds for step in steps), sum(limits.step(step.batch).seconds for step in steps)
    return {"steps": len(steps), "tokens": sum(step.num_tokens for step in steps), "seconds": seconds,
            "limit_seconds": least, "percent_of_limit": 100 * least / seconds}


@click.command()
@click.option("--only", type=click.Choice(list(LOADS)), multiple=True, help="Workloads to run.  [default: all]")
@click.option("--fast", is_flag=True)
@click.option("--output", default=None, metavar="FILE", help="Write the tables; 'results' is benchmarks/results/.")
def main(only: tuple[str, ...], fast: bool, output: str | None) -> None:
    console = Console(width=140)
    rates = measure_rates("cuda")
    found: dict[str, Any] = {"memory_read": rates.memory_read, "bfloat16": rates.bfloat16}
    for name in only or LOADS:
        found[name] = profile(name, LOADS[name], rates, console, {"fast": fast})
    if output is not None:
        path = RESULTS / "where-time-goes.json" if output == "results" else Path(output)
        path.write_text(json.dumps({**origin(), **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
