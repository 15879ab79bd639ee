"""`spill simulate`: a trace over replicas in simulated time, with measured step costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spillover.cli.cluster.router import POLICIES
from spillover.cli.options import comma_list
from spillover.errors import SpilloverError

if TYPE_CHECKING:
    from spillover.cluster.simulate.arrivals import Arrival
    from spillover.cluster.simulate.costs import Measured
    from spillover.cluster.simulate.run import FleetSettings

MOST_REPLICAS = 256
FORMATS = ("mooncake", "azure", "burstgpt")


@click.command()
@click.argument("trace", metavar="TRACE")
@click.option("--trace-format", default="auto", show_default=True, type=click.Choice(("auto", *FORMATS)),
              help="Format of TRACE; auto detects it from the first line.")
@click.option("--trace-limit", default=None, type=int, metavar="N", help="Play the first N requests.")
@click.option("--trace-speedup", default=1.0, show_default=True, help="2: requests come twice as fast.")
@click.option("--trace-length-scale", default=1.0, show_default=True, help="Factor on prompt and answer lengths.")
@click.option("--replicas", default="1", show_default=True, callback=comma_list(click.IntRange(1, MOST_REPLICAS)),
              metavar="N,...", help="Fleet sizes.")
@click.option("--split", "splits", default="", metavar="P+D,...",
              help="Also disaggregate prefill and decode: P replicas compute prompts, D decode; such as 3+1,2+2.")
@click.option("--policy", default="predicted", show_default=True, callback=comma_list(click.Choice(POLICIES)),
              metavar="POLICY,...", help="How the router chooses, as --routing-policy: predicted, prefix, least-load, "
                                         "round-robin.")
@click.option("--costs", required=True, metavar="FILE|measure|STEP,TOKEN",
              help="Step costs: a cost file; measure, to time --model now; or milliseconds per step and per token, as "
                   "for --simulate-step.")
@click.option("--model", default=None, metavar="MODEL",
              help="Model for --costs measure; the default model if not given.")
@click.option("--save-costs", default=None, metavar="FILE", help="Write the result of --costs measure.")
@click.option("--max-num-seqs", default=None, type=click.IntRange(min=1),
              help="Maximum requests per step.  [default: as measured, else 256]")
@click.option("--max-num-batched-tokens", default=None, type=click.IntRange(min=1),
              help="Maximum tokens per step.  [default: as measured, else 2048]")
@click.option("--block-size", default=None, type=click.IntRange(min=1),
              help="Tokens per KV block.  [default: as measured, else 16]")
@click.option("--num-blocks", default=None, type=click.IntRange(min=1),
              help="KV blocks of a replica's device.  [default: as measured]")
@click.option("--host-blocks", default=0, show_default=True, type=click.IntRange(min=0),
              help="KV blocks in a replica's host memory.")
@click.option("--host-rate", default="20GB", show_default=True, metavar="SIZE",
              help="Bytes per second from host memory to the device; needs --kv-bytes-per-token.")
@click.option("--transfer-rate", default="20GB", show_default=True, metavar="SIZE",
              help="Bytes per second of KV from a replica that prefills to one that decodes; needs "
                   "--kv-bytes-per-token.")
@click.option("--kv-bytes-per-token", default=None, type=click.IntRange(min=1), help="[default: as measured]")
@click.option("--request-seconds", default=None, type=click.FloatRange(min=0),
              help="Seconds of a request outside of steps: HTTP, tokenising, router.  [default: as measured, else 0]")
@click.option("--kv-events/--no-kv-events", default=True, show_default=True,
              help="Whether the router gets KV events of replicas, or estimates their caches.")
@click.option("--replica-cost", default=None, type=click.FloatRange(min=0), metavar="PRICE",
              help="Price of a replica per hour, to compute the cost of a million tokens.")
@click.option("--calibration", default=None, metavar="FILE",
              help="Results of benchmarks/simulate.py, whose errors are printed.  "
                   "[default: benchmarks/results/simulator.json, if it is there]")
@click.option("--output-json", default=None, metavar="FILE", help="Write all results to a JSON file.")
def simulate(trace: str, **options: Any) -> None:
    """Replay a trace over simulated replicas: hit rates, latencies and cost by router policy and number of replicas.

    Steps take measured times, replicas batch and cache as the engine does, and the router decides as spill router does.
    The assumptions behind the numbers, and their error against real runs, are printed too.

    \b
    Examples:
      spill simulate mooncake_trace.jsonl --replicas 1,2,4,8 --policy predicted,round-robin --costs costs.json
      spill simulate mooncake_trace.jsonl --replicas 4 --split 3+1,2+2 --costs 8,0.03 --num-blocks 30000
      spill simulate azure.csv --trace-limit 500 --costs measure --model MODEL --save-costs costs.json
    """
    from rich.console import Console

    from spillover.cluster.simulate.calibration import NOT_COMPARED, read_calibration
    from spillover.cluster.simulate.costs import as_json
    from spillover.cluster.simulate.report import assumptions, summary
    from spillover.cluster.simulate.run import simulate as play

    for name in ("save_costs", "output_json"):
        if options[name] is not None and not Path(options[name]).absolute().parent.is_dir():
            raise SpilloverError(f"--{name.replace('_', '-')} {options[name]}: there is no such folder")
    shapes, notes = _shapes(trace, options)
    calibration = read_calibration(options["calibration"])
    splits = [_split(text) for text in options["splits"].split(",") if text.strip()]
    if options["save_costs"] is not None and options["costs"] != "measure":
        raise SpilloverError("--save-costs writes what --costs measure finds; give both, or neither")
    if options["model"] is not None and options["costs"] != "measure":
        raise SpilloverError("--model is measured with --costs measure; leave it out otherwise")
    measured = _costs(options)
    settings = _settings(options, measured, splits)
    if options["save_costs"] is not None:
        Path(options["save_costs"]).write_text(json.dumps(as_json(measured), indent=2) + "\n", encoding="utf-8")
    arrivals, best = _arrivals(shapes, settings[0].replica.block_size)
    console = Console(width=None if Console().is_terminal else 160)
    rows = []
    for each in settings:
        rows.append(summary(play(arrivals, each, measured.fit.costs), options["replica_cost"]))
    lines = [*notes, *assumptions(measured, settings),
             f"Hit rates are shares of prompt tokens; one unlimited cache for all replicas would reach {best:.1%}"]
    compared = calibration.lines() if calibration is not None else [f"Error: {NOT_COMPARED}"]
    console.print(_table(rows))
    for line in (*lines, *compared):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if options["output_json"] is not None:
        made = {"trace": Path(trace).name, "requests": len(arrivals), "reusable": best, "results": rows,
                "assumptions": lines, "calibration": compared, "costs": as_json(measured)}
        Path(options["output_json"]).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
        click.echo(f"written to {options['output_json']}")


def _shapes(path: str, options: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """Read the trace; return its requests, and notes on how to interpret them."""
    from spillover.bench.workloads.traces import Replay, read_azure, read_burstgpt, read_mooncake, trace_shapes

    replay = Replay(options["trace_limit"], options["trace_speedup"], options["trace_length_scale"])
    seems = _format(path)
    kind = options["trace_format"] if options["trace_format"] != "auto" else seems
    read = {"mooncake": read_mooncake, "azure": read_azure, "burstgpt": read_burstgpt}[kind]
    shapes, notes = trace_shapes(read(path), replay)
    shared = () if kind == "mooncake" else (f"The trace ({kind}) does not say which prompts share a "
                                              "prefix; the simulation assumes that none do",)
    return shapes, (*notes, *shared)


def _format(path: str) -> str:
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            first = file.readline()
    except OSError as error:
        raise SpilloverError(f"cannot read the trace '{path}': {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpilloverError(f"'{path}' is not a text file; unpack it if it is compressed") from error
    if first.lstrip().startswith("{"):
        return "mooncake"
    return "burstgpt" if "Request tokens" in first else "azure"


def _arrivals(shapes: Any, block_size: int) -> tuple[list[Arrival], float]:
    from spillover.cluster.simulate.arrivals import Arrival, BlockNames, reusable

    names = BlockNames(block_size)
    made = [Arrival(shape.at or 0.0, shape.prompt_len, shape.output_len, names.keys(
        (part.key, part.length) for part in shape.parts)) for shape in shapes]
    return made, reusable(made, block_size)


def _split(text: str) -> tuple[int, int]:
    try:
        prefill, decode = (int(part) for part in text.split("+"))
    except ValueError:
        prefill = decode = 0
    if not (1 <= prefill <= MOST_REPLICAS and 1 <= decode <= MOST_REPLICAS):
        raise SpilloverError(f"--split is replicas that prefill + replicas that decode, such as 3+1; got '{text}'")
    return prefill, decode


def _costs(options: dict[str, Any]) -> Measured:
    from spillover.cluster.simulate.costs import given, read_costs

    if options["costs"] == "measure":
        from spillover.cli.cluster.measure_steps import measure_steps

        return measure_steps(options["model"])
    found = given(options["costs"])
    return found if found is not None else read_costs(options["costs"])


def _settings(options: dict[str, Any], measured: Measured, splits: list[tuple[int, int]]) -> list[FleetSettings]:
    from spillover.cluster.simulate.batching import ReplicaSettings
    from spillover.cluster.simulate.run import FleetSettings
    from spillover.units import parse_bytes

    def chosen(name: str, otherwise: int | None) -> Any:
        return next((each for each in (options[name], getattr(measured, name), otherwise) if each is not None), None)

    blocks, width = chosen("num_blocks", None), chosen("kv_bytes_per_token", None)
    if blocks is None:
        raise SpilloverError("these costs do not say how many KV blocks a replica has; give --num-blocks")
    if width is None and (splits or options["host_blocks"]):
        raise SpilloverError("these costs do not say how large the KV of a token is, and --split and --host-blocks "
                             "copy KV; give --kv-bytes-per-token")
    size = chosen("block_size", 16)
    host = parse_bytes(options["host_rate"], "--host-rate")
    transfer = parse_bytes(options["transfer_rate"], "--transfer-rate")
    if min(host, transfer) < 1:
        raise SpilloverError("--host-rate and --transfer-rate are bytes per second, such as 20GB")
    replica = ReplicaSettings(chosen("max_num_seqs", 256), chosen("max_num_batched_tokens", 2048), size, blocks,
                              options["host_blocks"], (width or 0) * size / host if options["host_blocks"] else 0.0)
    outside = options["request_seconds"]
    own, router = (measured.request_seconds, measured.router_seconds) if outside is None else (outside, 0.0)
    fleets = [(each, 0) for each in options["replicas"]] + splits
    return [FleetSettings(prefill, decode, policy, options["kv_events"], replica, own, router,
                          (width or 0) / transfer if decode else 0.0)
            for prefill, decode in fleets for policy in options["policy"]]


def _table(rows: list[dict[str, Any]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    priced = "cost_per_million_tokens" in rows[0]
    for name in ("replicas", "policy", "req/s", "out tok/s", "hit rate", "TTFT p50", "p95", "p99 ms", "ITL p50", "p95",
                 "p99 ms", "busy", *(["cost/M tokens"] if priced else [])):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in rows:
        fleet = f"{row['replicas']}+{row['decode_replicas']}" if row["decode_replicas"] else str(row["replicas"])
        table.add_row(fleet, row["policy"], f"{row['requests_per_second']:.2f}",
                      f"{row['output_tokens_per_second']:,.0f}", f"{row['hit_rate']:.1%}",
                      *(f"{row[f'{name}_p{rank}'] * 1e3:,.1f}" for name in ("ttft", "itl") for rank in (50, 95, 99)),
                      f"{row['busy']:.0%}", *([f"{row['cost_per_million_tokens']:.3f}"] if priced else []))
    return table
