"""`spill bench sweep`: the rates that a server sustains, from one request at a time to saturation."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spillover.bench.workloads.workload_options import WorkloadOptions
from spillover.cli.bench.bench_serve import live_bar
from spillover.cli.bench.load_options import Rate, ServerOptions, SeveralValues, prepare, server_options, warm_up
from spillover.cli.bench.measuring import make_console
from spillover.cli.bench.workload_options import workload_options
from spillover.errors import SpilloverError

if TYPE_CHECKING:
    from rich.table import Table

    from spillover.bench.serving.load import Live
    from spillover.bench.sweep import SweepResult


@click.command(cls=SeveralValues)
@click.option("--steps", default=10, show_default=True,
              help="Number of rates: one request at a time, as many at once as allowed, and rates spaced evenly "
                   "between the two.")
@click.option("--max-concurrency", default=256, show_default=True, help="Concurrent requests in the second step.")
@click.option("--max-seconds", default=30.0, show_default=True, help="Stop sending after this many seconds per step.")
@click.option("--burstiness", type=Rate(), default=1.0, show_default=True,
              help="Shape of the gamma distribution of gaps in open loop: 1 is Poisson, inf is even.")
@click.option("--goodput", multiple=True, metavar="NAME:MS",
              help="Latency objectives in milliseconds, such as `--goodput ttft:500 tpot:50`: find the highest rate "
                   "that meets them.")
@click.option("--attainment", default=0.99, show_default=True, help="Fraction of requests that must meet the "
                                                                    "objectives.")
@click.option("--refine", default=2, show_default=True, help="Extra steps that close in on that rate.")
@click.option("--save-result", default=None, metavar="FILE", help="Write every step as JSON.")
@click.option("--disable-tqdm", is_flag=True, help="Hide the progress bar.")
@server_options
@workload_options()
def sweep(workload: WorkloadOptions, server: ServerOptions, steps: int, max_concurrency: int, max_seconds: float,
          burstiness: float, goodput: tuple[str, ...], attainment: float, refine: int, save_result: str | None,
          disable_tqdm: bool) -> None:
    """Measure rates from one request at a time to saturation; stop early if requests pile up.

    \b
    Examples:
      spill bench sweep --random-input-len 64 --random-output-len 16 --num-prompts 64 --max-concurrency 16
      spill bench sweep --port 8001 --dataset-name sharegpt --dataset-path FILE --goodput ttft:500 tpot:50
    """
    from spillover.bench.serving.serving_report import parse_goodput
    from spillover.bench.sweep import Sweep, SweepPlan

    goals = [part for item in goodput for part in item.replace(",", " ").split()]
    plan = SweepPlan(steps, max_concurrency, burstiness, max_seconds, parse_goodput(goals) or None, attainment, refine,
                     workload.seed)
    console = make_console()
    load, made = prepare(server, workload)
    load = dataclasses.replace(load, details={"workload": made.name, "workload_options": workload.as_dict(),
                                              "command": shlex.join(["spill", *sys.argv[1:]])})
    console.print(made.stats().table(), highlight=False)
    warm_up(made, load, server.num_warmups)
    with contextlib.ExitStack() as bars:
        def watch(name: str, count: int) -> Callable[[Live], None]:
            bars.close()
            return bars.enter_context(live_bar(count, disable_tqdm, name))

        sweeping = Sweep(made.requests, load, plan, watch)
        for step in sweeping.run():
            bars.close()
            whole = step.whole
            click.echo(f"{step.name}: {whole.request_throughput:.2f} req/s, {whole.output_throughput:.1f} tok/s, "
                       f"median TTFT {whole.ttft.median * 1e3:.1f} ms, TPOT {whole.tpot.median * 1e3:.1f} ms"
                       + (", over-saturated" if step.saturated else ""))
    result = sweeping.result()
    console.print(sweep_table(result), highlight=False)
    for line in sweep_lines(result):
        console.print(line, highlight=False)
    if save_result is not None:
        try:
            Path(save_result).write_text(json.dumps(result.to_json(), indent=2) + "\n")
        except OSError as error:
            raise SpilloverError(f"cannot write --save-result '{save_result}': {error.strerror}") from error
        click.echo(f"written to {save_result}")


def sweep_table(result: SweepResult) -> Table:
    from spillover.bench.table import make_table

    table = make_table("Rates from one request at a time to saturation", "offered", "requests", "failed", "req/s",
                       "output tok/s", "at once", "TTFT p50 ms", "p99 ms", "TPOT p50 ms", "p99 ms", "E2EL p50 ms",
                       *(["objectives met"] if result.plan.goodput else []), "client")
    slowest_first = sorted(result.steps, key=lambda step: (step.kind == "throughput", step.rate or 0.0))
    for step in slowest_first:
        whole = step.whole
        cells = [f"{whole.completed:,}", f"{whole.failed:,}", f"{whole.request_throughput:.2f}",
                 f"{whole.output_throughput:,.1f}", f"{whole.mean_concurrency:.1f}",
                 *(f"{value * 1e3:,.1f}" for value in (whole.ttft.median, whole.ttft.percentiles[99.0],
                                                       whole.tpot.median, whole.tpot.percentiles[99.0],
                                                       whole.e2el.median))]
        if result.plan.goodput:
            cells.append(f"{whole.attainment or 0:.1%}")
        client = "SATURATED" if step.run.client.saturated else "kept up"
        table.add_row(step.name + (" *" if step.saturated else ""), *cells, client)
    if result.saturation_rate is not None:
        table.caption = "* over-saturated: requests came faster than they were answered"
    return table


def sweep_lines(result: SweepResult) -> list[str]:
    """Return the findings, one sentence each."""
    best, found = result.best, result.to_json()
    lines = [f"Max throughput: {found['max_output_throughput']:,.1f} output tokens/s, at {best.name}; "
             f"{found['max_request_throughput']:.2f} requests/s"]
    if result.saturation_rate is not None:
        lines.append(f"Over-saturated from {result.saturation_rate:.3g} requests/s upward")
    if result.plan.goodput:
        goals = ", ".join(f"{name} {limit * 1e3:g} ms" for name, limit in result.plan.goodput.items())
        share = f"{result.plan.attainment:.0%} of requests within {goals}"
        lines.append(f"Max rate with {share}: " + (f"{result.max_rate:.3g} requests/s" if result.max_rate is not None
                                                   else "none of those tried"))
    return lines
