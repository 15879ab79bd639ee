"""The output of a benchmark: vLLM's own lines for existing parsers, then a table of all numbers with their limits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from spillover.bench.latency import LatencyResult
from spillover.bench.table import make_table
from spillover.bench.target import Limits
from spillover.bench.throughput import ThroughputResult
from spillover.errors import SpilloverError
from spillover.units import format_bytes, format_rate

NOTHING = "-"


def print_throughput(console: Console, result: ThroughputResult) -> None:
    values = result.as_dict()
    name = ", ".join(f"{option} {value}" for option, value in result.coordinates.items())
    if name:
        console.print(f"[bold]{name}[/]", highlight=False)
    # These three lines are the ones that parsers of `vllm bench throughput` look for.
    print(f"Throughput: {values['requests_per_second']:.2f} requests/s, "
          f"{values['tokens_per_second']:.2f} total tokens/s, "
          f"{values['output_tokens_per_second']:.2f} output tokens/s")
    print(f"Total num prompt tokens:  {values['total_prompt_tokens']}")
    print(f"Total num output tokens:  {values['total_output_tokens']}")
    sources = ", ".join(f"{count} {source}" for source, count in values["tokens_by_source"].items() if count)
    console.print(f"Prompt tokens by source:  {sources}", highlight=False)
    resident = format_bytes(values["rss_bytes"])
    if result.planned_bytes:
        share = values["rss_bytes"] / result.planned_bytes
        resident += f", {share:.0%} of the {format_bytes(result.planned_bytes)} planned"
    console.print(f"Resident memory:          {resident}", highlight=False)
    if result.limit is not None:
        read, products, share_of_limit, bound = result.limit.cells()
        console.print(f"Reached:                  {share_of_limit} of the limit ({bound}); memory read {read}, "
                      f"matrix products {products}", highlight=False)


def throughput_table(results: Sequence[ThroughputResult]) -> Table:
    """Return a table with one row per setting; "x first" is relative to the first row. Empty columns are left out."""
    options = list(dict.fromkeys(option for result in results for option in result.coordinates))
    headings = [*options, "output tok/s", "x first", "total tok/s", "of limit", "mean batch", "blocks", "wasted slots",
                "cached prompt", "preempted"]
    first = results[0].output_rate.median
    rows = [[*(result.coordinates.get(option, NOTHING) for option in options), *_throughput_cells(result, first)]
            for result in results]
    kept = [index for index in range(len(headings)) if any(row[index] != NOTHING for row in rows)]
    table = make_table("Throughput", *(headings[index] for index in kept), text=options)
    for row in rows:
        table.add_row(*(row[index] for index in kept))
    return table


def comparison(results: Sequence[ThroughputResult]) -> list[str]:
    """Return one line that compares our best result with the best of transformers, if the run has both; else none."""
    theirs = [result for result in results if result.coordinates.get("backend") == "hf"]
    ours = [result for result in results if result.coordinates.get("backend") == "spillover"]
    if not theirs or not ours:
        return []
    best, reference = (max(group, key=lambda result: result.output_rate.median) for group in (ours, theirs))
    ratio = best.output_rate.median / reference.output_rate.median
    return [f"{ratio:.2f}x the output tokens per second of transformers.generate at its best here "
            f"({best.output_rate.median:,.1f} against {reference.output_rate.median:,.1f})"]


def latency_table(results: Sequence[LatencyResult]) -> Table:
    table = make_table("Latency by phase", "phase", "median", "95% interval", "tok/s", "memory read", "matrix products",
                       "of limit", "bound")
    for result in results:
        shape = f"batch {result.batch_size}, {result.input_len} in"
        first, whole = result.first_token, result.latency
        table.add_row(f"prefill, {shape}", _ms(first.median), f"{_ms(first.low)} .. {_ms(first.high)}",
                      f"{result.batch_size * result.input_len / first.median:,.0f}",
                      *(result.prefill.cells() if result.prefill else [NOTHING] * 4))
        step = result.token_time
        if step is not None:
            table.add_row(f"decode step, {shape}", _ms(step.median), f"{_ms(step.low)} .. {_ms(step.high)}",
                          f"{result.batch_size / step.median:,.1f}",
                          *(result.decode.cells() if result.decode else [NOTHING] * 4))
        table.add_row(f"whole, {shape}, {result.output_len} out", _ms(whole.median),
                      f"{_ms(whole.low)} .. {_ms(whole.high)}",
                      f"{result.batch_size * result.output_len / whole.median:,.1f}", *[""] * 4, end_section=True)
    return table


def print_latency(console: Console, result: LatencyResult) -> None:
    """Print the lines of `vllm bench latency`."""
    values = result.as_dict()
    if result.batch_size:
        console.print(f"[bold]batch size {result.batch_size}, {result.input_len} in, {result.output_len} out[/]",
                      highlight=False)
    print(f"Avg latency: {values['avg_latency']} seconds")
    for rank, value in values["percentiles"].items():
        print(f"{rank}% percentile latency: {value} seconds")


def print_limits(console: Console, limits: Limits) -> None:
    console.print(f"Limits measured on this machine: memory read {format_rate(limits.memory_rate, 'B/s')}, "
                  f"matrix products {format_rate(limits.matrix_rate, 'FLOP/s')}", highlight=False)


def write_json(path: str, header: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> None:
    """Write the results; a single one is repeated at the top level, where parsers of vLLM's files look for its keys."""
    single = dict(results[0]) if len(results) == 1 else {}
    try:
        Path(path).write_text(json.dumps({**single, **header, "results": list(results)}, indent=2) + "\n")
    except OSError as error:
        raise SpilloverError(f"cannot write --output-json '{path}': {error.strerror}") from error


def _throughput_cells(result: ThroughputResult, first: float) -> list[str]:
    values, rate, limit = result.as_dict(), result.output_rate, result.limit
    sources = values["tokens_by_source"]
    cached = 1 - sources["computed"] / max(1, sum(sources.values()))
    paged = values["num_blocks"] > 0
    spread = f" ({rate.low:,.1f} .. {rate.high:,.1f})" if len(result.runs) > 1 else ""
    return [
        f"{rate.median:,.1f}{spread}",
        f"{rate.median / first:.2f}x",
        f"{values['tokens_per_second']:,.1f}",
        f"{limit.of_limit:.0%} {limit.bound.name}" if limit else NOTHING,
        f"{result.occupancy:.1f}" if result.occupancy else NOTHING,
        f"{values['num_blocks']:,}" if paged else NOTHING,
        f"{values['mean_slots_wasted']:,.0f} ({result.waste:.1%})" if result.waste is not None else NOTHING,
        f"{cached:.0%}" if paged else NOTHING,
        str(values["preemptions"]) if paged else NOTHING,
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 10 else f"{seconds:,.2f} s"
