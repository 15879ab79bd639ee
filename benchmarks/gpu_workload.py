"""Common code of the GPU workloads: models of the true shapes with random weights, limits, and the form of a result.

A result file holds one figure, or a list of them: workload, metric, unit, value (the median), repeats (all measured
values), limit (by rates measured in the same run), percent_of_limit, and the origin.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import platform
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch

from spillover import LLM, SamplingParams
from spillover.bench.provenance import commit, versions
from spillover.engine.output.outputs import RequestOutput
from spillover.lab.engines.shapes import shapes
from spillover.models.registry import architecture
from spillover.plan.measure import measure_rates
from spillover.plan.rates import Rates
from spillover.plan.roofline import Roofline
from spillover.plan.shapes import model_shape

RESULTS = Path(__file__).parent / "results"

MODELS: dict[str, dict[str, Any]] = {name: json.loads((folder / "config.json").read_text())
                                     for name, folder in shapes().items()}


@dataclass(frozen=True)
class Figure:
    metric: str
    unit: str
    repeats: Sequence[float]
    limit: float
    lower_is_better: bool = False
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def value(self) -> float:
        return statistics.median(self.repeats)

    @property
    def percent_of_limit(self) -> float:
        return 100 * (self.limit / self.value if self.lower_is_better else self.value / self.limit)


@contextlib.contextmanager
def opened(name: str, **flags: Any) -> Iterator[LLM]:
    """Open a model of the true shape with random weights; print the cost of its CUDA graphs at the end."""
    gc.collect()  # frees a model opened before
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[name]))
        with LLM(folder, load_format="dummy", skip_tokenizer_init=True, **flags) as llm:
            plan = llm.plan
            print(f"{name}: {plan.device_name}, {plan.dtype}, {plan.num_blocks:,} blocks of {plan.block_size}, "
                  f"{plan.max_num_seqs} requests of up to {plan.max_model_len:,} tokens", flush=True)
            yield llm
            print(graph_line(llm), flush=True)


def graph_line(llm: LLM) -> str:
    stats = getattr(getattr(llm.engine.runner, "inner", llm.engine.runner), "graph_stats", None)
    if stats is None:
        return "no CUDA graphs"
    return f"{stats.graphs} CUDA graphs captured in {stats.seconds:.2f} s, {stats.nbytes / 1e6:.0f} MB"


def roofline(name: str, rates: Rates | None = None) -> Roofline:
    """Return the limits of a model on this machine, by the given rates or by rates measured now."""
    built = architecture(MODELS[name])
    config = built.config(MODELS[name])
    return Roofline(model_shape(config, built.weight_specs(config), "bfloat16"), rates or measure_rates("cuda"))


def run(llm: LLM, prompts: Sequence[Sequence[int]], lengths: Sequence[int], temperature: float) -> list[RequestOutput]:
    params = [SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, detokenize=False)
              for length in lengths]
    return llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)


def write(name: str, figures: Sequence[Figure], output: str | None, **details: Any) -> None:
    """Print the figures and write them to `output`, or to benchmarks/results/NAME.json if that is "results"."""
    entries = [{"workload": name, "metric": figure.metric, "unit": figure.unit, "value": figure.value,
                "repeats": list(figure.repeats), "limit": figure.limit, "percent_of_limit": figure.percent_of_limit,
                **figure.details, **details, **origin()} for figure in figures]
    for figure in figures:
        print(f"{name}: {figure.metric} {figure.value:,.2f} {figure.unit} "
              f"({', '.join(f'{each:,.2f}' for each in figure.repeats)}), limit {figure.limit:,.2f}, "
              f"{figure.percent_of_limit:.0f}%", flush=True)
    if output is not None:
        path = RESULTS / f"{name}.json" if output == "results" else Path(output)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(entries[0] if len(entries) == 1 else entries, indent=2) + "\n")


def origin() -> dict[str, Any]:
    """Return where a result came from: commit, date, GPU, versions and command."""
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {"python": platform.python_version(), **versions("triton")},
        "command": shlex.join(["python", *sys.argv]),
    }


def options(repeats: int = 3) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        command = click.option("--output", default=None, metavar="FILE",
                               help="Write the result; 'results' is benchmarks/results/.")(command)
        return click.option("--repeats", default=repeats, show_default=True)(command)

    return decorate
