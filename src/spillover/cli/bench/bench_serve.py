"""`spill bench serve`: load on a running server, reported as by `vllm bench serve`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spillover.bench.workloads.workload_options import WorkloadOptions
from spillover.cli.bench.load_options import (
    Rate,
    ServerOptions,
    SeveralValues,
    pairs,
    prepare,
    server_options,
    shown_rate,
    warm_up,
)
from spillover.cli.bench.measuring import make_console
from spillover.cli.bench.workload_options import workload_options
from spillover.cli.options import comma_list
from spillover.errors import SpilloverError

if TYPE_CHECKING:
    from rich.table import Table

    from spillover.bench.records import Run
    from spillover.bench.serving.load import Live, LoadOptions
    from spillover.bench.serving.serve_request import ServeRequest
    from spillover.bench.serving.serving_report import Report, ReportOptions
    from spillover.bench.workloads.arrivals import Arrivals

METRICS = ("ttft", "tpot", "itl", "e2el")


@click.command(cls=SeveralValues)
@click.option("--request-rate", default="inf", show_default=True, callback=comma_list(Rate()), metavar="RATE,...",
              help="Requests per second, in open loop; inf sends all at once, or as --max-concurrency lets them.")
@click.option("--burstiness", type=Rate(), default=1.0, show_default=True,
              help="Shape of the gamma distribution of gaps: 1 is Poisson, less is burstier, inf is even.")
@click.option("--max-concurrency", default=None, callback=comma_list(click.INT), metavar="INT,...",
              help="Maximum concurrent requests; others wait in the client.")
@click.option("--static-batch-size", type=click.IntRange(min=1), default=None, metavar="N",
              help="Static batching by the client: send N requests together, and the next N once all of these have "
                   "finished.")
@click.option("--ramp-up-strategy", type=click.Choice(["linear", "exponential"]), default=None,
              help="Raise the rate from --ramp-up-start-rps to --ramp-up-end-rps, linearly or exponentially.")
@click.option("--ramp-up-start-rps", type=float, default=0.0, help="Requests per second at the first request.")
@click.option("--ramp-up-end-rps", type=float, default=0.0, help="Requests per second at the last request.")
@click.option("--self-timed/--no-self-timed", default=True, show_default=True,
              help="Keep a trace's own times, unless --request-rate is given.")
@click.option("--max-seconds", type=float, default=None, help="Stop sending after this many seconds.")
@click.option("--goodput", multiple=True, metavar="NAME:MS",
              help="Latency objectives in milliseconds, such as `--goodput ttft:500 tpot:50`.")
@click.option("--percentile-metrics", default="ttft,tpot,itl", show_default=True,
              help=f"Print these latencies: {', '.join(METRICS)}.")
@click.option("--metric-percentiles", default="99", show_default=True, help="Print these percentiles, such as "
                                                                            "25,50,99.")
@click.option("--save-result", is_flag=True, help="Write the result as JSON.")
@click.option("--save-detailed", is_flag=True, help="Include every request's events and text in the result.")
@click.option("--append-result", is_flag=True, help="Append the result to the file as one line.")
@click.option("--result-dir", default=None, metavar="DIR", help="Folder of the result. [default: the current one]")
@click.option("--result-filename", default=None, metavar="FILE",
              help="File name of the result. [default: made from label, rate, model and date]")
@click.option("--label", default=None, help="Name of the result. [default: the backend's]")
@click.option("--metadata", multiple=True, metavar="KEY=VALUE", help="Add this pair to the result; may be given more "
                                                                     "than once.")
@click.option("--profile", is_flag=True, help="Profile the server during the run (POST /start_profile and "
                                              "/stop_profile; `spill serve` needs --profiler-dir).")
@click.option("--disable-tqdm", is_flag=True, help="Hide the progress bar.")
@server_options
@workload_options()
def serve(workload: WorkloadOptions, server: ServerOptions, **options: Any) -> None:
    """Measure a running server under load. Flags, console block and JSON keys are those of `vllm bench serve`.

    Comma lists in --request-rate and --max-concurrency start one run each, on fresh prompts, and print a table of all.

    \b
    Examples:
      spill bench serve --random-input-len 256 --random-output-len 64 --num-prompts 32 --max-concurrency 4
      spill bench serve --request-rate 1,4,10,inf --num-prompts 32
      spill bench serve --dataset-name sharegpt --dataset-path FILE --request-rate 4 --goodput ttft:500 tpot:50
      spill bench serve --port 8001 --dataset-name azure --dataset-path trace.csv --trace-limit 200
    """
    from spillover.bench.serving.serving_report import DEFINITIONS, Report

    report_options = _report_options(server, workload, options)
    points = _points(workload, options)
    console = make_console()
    load, made = prepare(server, workload)
    stats = made.stats()
    load = dataclasses.replace(
        load, arrivals=points[0], seconds=options["max_seconds"], keep_text=options["save_detailed"],
        details={"workload": made.name, "workload_options": workload.as_dict(), "workload_stats": stats.as_dict(),
                 "command": shlex.join(["spill", *sys.argv[1:]])})
    console.print(stats.table(), highlight=False)
    warm_up(made, load, server.num_warmups)
    reports = []
    with _profiled(server, options["profile"]):
        for place, arrivals in enumerate(points):  # each with prompts of its own, or the prefix cache is measured
            run = _run(made.requests(place), dataclasses.replace(load, arrivals=arrivals), options["disable_tqdm"])
            report = Report(run, report_options)
            reports.append(report)
            click.echo(report.block())
            for note in report.notes():
                loud = note.startswith(("CLIENT SATURATED", "STOPPED EARLY", "Failed:"))
                click.secho(note, fg="red" if loud else None)
            if options["save_result"] or options["save_detailed"] or options["append_result"]:
                _write(report, options, arrivals if len(points) > 1 else None)
    if len(points) > 1:
        console.print(_points_table(points, reports), highlight=False)
    click.secho(DEFINITIONS, dim=True)
    for run in (report.run for report in reports):
        if run.failed and not run.completed:
            raise SpilloverError(f"all {len(run.failed)} requests failed, the first with: {run.failed[0].error}")


def _points(workload: WorkloadOptions, options: dict[str, Any]) -> list[Arrivals]:
    """Return the arrivals of each rate and concurrency limit, checked before the first run."""
    from spillover.bench.workloads.arrivals import Arrivals

    return [Arrivals(rate, options["burstiness"], limit, options["static_batch_size"], options["ramp_up_strategy"],
                     options["ramp_up_start_rps"], options["ramp_up_end_rps"], options["self_timed"], workload.seed)
            for limit in options["max_concurrency"] or (None,) for rate in options["request_rate"]]


def _run(requests: list[ServeRequest], load: LoadOptions, silent: bool) -> Run:
    from spillover.bench.serving.load_processes import run_load

    arrivals = load.arrivals
    asking = arrivals.describe([request.at for request in requests])
    click.echo(f"{len(requests):,} requests to {load.base_url}{load.path}, model {load.dialect.model}")
    click.echo(f"Traffic request rate: {shown_rate(arrivals.rate)} ({asking['arrival']})")
    click.echo(f"Burstiness factor: {shown_rate(arrivals.burstiness)}")
    click.echo(f"Maximum request concurrency: {arrivals.max_concurrency or arrivals.static_batch_size}")
    with live_bar(len(requests), silent) as show:
        return run_load(requests, load, show)


def _points_table(points: list[Arrivals], reports: list[Report]) -> Table:
    from spillover.bench.table import make_table

    goals = reports[0].options.goodput is not None
    table = make_table("All runs", "rate", "concurrency", "requests", "failed", "req/s", "output tok/s", "TTFT p50 ms",
                       "p99 ms", "TPOT p50 ms", "p99 ms", *(["objectives met"] if goals else []))
    for arrivals, report in zip(points, reports, strict=True):
        whole = report.whole
        times = (whole.ttft.median, whole.ttft.percentiles[99.0], whole.tpot.median, whole.tpot.percentiles[99.0])
        table.add_row(shown_rate(arrivals.rate), str(arrivals.max_concurrency or "no limit"), f"{whole.completed:,}",
                      f"{whole.failed:,}", f"{whole.request_throughput:.2f}", f"{whole.output_throughput:,.1f}",
                      *(f"{value * 1e3:,.1f}" for value in times),
                      *([f"{whole.attainment or 0:.1%}"] if goals else []))
    return table


def _report_options(server: ServerOptions, workload: WorkloadOptions, options: dict[str, Any]) -> ReportOptions:
    from spillover.bench.serving.serving_report import ReportOptions, parse_goodput

    metrics = tuple(part.strip() for part in options["percentile_metrics"].split(",") if part.strip())
    unknown = [metric for metric in metrics if metric not in METRICS]
    if unknown:
        raise SpilloverError(f"--percentile-metrics takes a list of {', '.join(METRICS)}; got '{unknown[0]}'")
    try:
        ranks = tuple(float(part) for part in options["metric_percentiles"].split(","))
    except ValueError:
        ranks = (math.nan,)
    if not all(0 <= rank <= 100 for rank in ranks):
        raise SpilloverError(f"--metric-percentiles takes numbers from 0 to 100, such as 25,50,99; got "
                             f"'{options['metric_percentiles']}'")
    goals = [part for item in options["goodput"] for part in item.replace(",", " ").split()]
    return ReportOptions(metrics, ranks, parse_goodput(goals) or None, server.backend, options["label"],
                         workload.tokenizer, pairs(options["metadata"], "--metadata"))


@contextlib.contextmanager
def live_bar(total: int, disabled: bool = False, what: str = "requests") -> Iterator[Callable[[Live], None]]:
    """Show requests finished, running and failed, tokens per second and mean TTFT; silent if stderr is a file."""
    from spillover.progress import counted

    with counted(total, what, not disabled) as show:
        def shown(live: Live) -> None:
            first = live.first_token_seconds / live.first_tokens if live.first_tokens else 0.0
            rate = live.output_tokens / live.seconds if live.seconds > 0 else 0.0
            failed = f", [red]{live.failed} failed[/red]" if live.failed else ""
            show(live.completed + live.failed,
                 f"{live.running} running{failed}, {rate:,.0f} tok/s, TTFT {first * 1e3:,.0f} ms")

        yield shown


@contextlib.contextmanager
def _profiled(server: ServerOptions, wanted: bool) -> Iterator[None]:
    from spillover.bench.serving import server_facts

    headers = dict(server.all_headers)
    if not wanted:
        yield
        return
    try:
        server_facts.post(server.base_url + "/start_profile", headers, server.insecure)
    except SpilloverError as refusal:
        raise SpilloverError(f"--profile: the server at {server.base_url} refused POST /start_profile: "
                             f"{refusal}") from None
    try:
        yield
    finally:
        try:
            ended = server_facts.post(server.base_url + "/stop_profile", headers, server.insecure)
        except SpilloverError as refusal:
            click.secho(f"--profile: the server refused POST /stop_profile: {refusal}", fg="red", err=True)
        else:
            if "trace" in ended:
                click.echo(f"Trace of {ended.get('steps')} steps, on the server: {ended['trace']} "
                           "(https://ui.perfetto.dev opens it)")


def _write(report: Report, options: dict[str, Any], point: Arrivals | None) -> None:
    """Write the result. `point`: one of several, each of which gets a file unless they are appended to one."""
    result = report.to_json(options["save_detailed"])
    path = Path(options["result_dir"] or ".") / (options["result_filename"] or _file_name(report, options))
    if point is not None and options["result_filename"] and not options["append_result"]:
        limit = "" if point.max_concurrency is None else f"-concurrency{point.max_concurrency}"
        path = path.with_name(f"{path.stem}-{shown_rate(point.rate)}qps{limit}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if options["append_result"]:
            with path.open("a", encoding="utf-8") as file:
                file.write(("\n" if file.tell() else "") + json.dumps(result))
        else:
            path.write_text(json.dumps(result), encoding="utf-8")
    except OSError as error:
        raise SpilloverError(f"cannot write the result to '{path}': {error.strerror}") from error
    click.echo(f"written to {path}")


def _file_name(report: Report, options: dict[str, Any]) -> str:
    """Return the file name in vLLM's format."""
    details = report.run.details
    model = str(details.get("model") or "model").rpartition("/")[2]
    limit = details.get("max_concurrency")
    rate = (f"ramp-up-{details['ramp_up_strategy']}-{options['ramp_up_start_rps']:g}qps-"
            f"{options['ramp_up_end_rps']:g}qps" if "ramp_up_strategy" in details else f"{details['request_rate']}qps")
    at = datetime.fromtimestamp(report.run.start_unix).strftime("%Y%m%d-%H%M%S")
    limited = "" if limit is None else f"-concurrency{limit}"
    return f"{options['label'] or report.options.backend}-{rate}{limited}-{model}-{at}.json"
