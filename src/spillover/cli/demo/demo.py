"""`spill demo`: the machine, the plan, an answer, a small load, speeds with their limits, chats that spill."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from spillover.cli.options import engine_options
from spillover.engine.config import EngineConfig

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from spillover.bench.bounds import Achieved
    from spillover.bench.target import Limits
    from spillover.bench.workloads.workloads import Vocabulary
    from spillover.cli.bench.targets import EngineTarget
    from spillover.engine.llm import LLM
    from spillover.plan.hardware import Machine
    from spillover.plan.rates import Rates

QUESTION = "What is the capital of France?"
LOAD_REQUESTS = 24
LOAD_INPUTS, LOAD_OUTPUTS = (16, 256), (8, 64)
LOAD_PREFIX = 96  # number of tokens with which every second request begins


@click.command()
@engine_options()
def demo(config: EngineConfig) -> None:
    """See it work, in under three minutes.

    Shows this machine, the memory plan, a real answer, a mixed load, speeds with their limits, chats whose KV spills to
    host memory, and a short comparison of memory configurations. Offline once the model is downloaded.

    \b
    Example:
      spill demo
    """
    from rich.console import Console

    from spillover.cli.loading import open_llm, plan_only, timed_rates

    console = Console()
    planned = plan_only(config)  # imports torch while showing a bar; the imports below need it

    from spillover.bench.latency import measure
    from spillover.bench.workloads.workloads import Vocabulary
    from spillover.cli.bench.measuring import CODES_NOTE
    from spillover.cli.bench.targets import EngineTarget, RooflineLimits
    from spillover.cli.demo.demo_chats import show_chats
    from spillover.cli.demo.demo_lab import show_comparison
    from spillover.cli.plan.plan import print_plan
    from spillover.plan.hardware import probe
    from spillover.plan.roofline import Roofline
    from spillover.plan.shapes import model_shape
    from spillover.units import format_bytes

    rates = timed_rates(planned.plan.device)
    _heading(console, "This machine")
    machine = probe()
    _print_machine(console, machine, rates)
    _heading(console, "The plan")
    print_plan(console, planned.plan)

    shape = model_shape(planned.model_config, planned.specs, planned.plan.dtype, kv_dtype=planned.plan.kv_cache_dtype)
    limits = RooflineLimits(Roofline(shape, rates))
    with open_llm(config) as llm:
        special = llm.tokenizer.special_ids if llm.tokenizer is not None else frozenset[int]()
        vocabulary = Vocabulary(planned.model_config.vocab_size, special)
        _heading(console, "An answer")
        _answer(console, llm)
        _heading(console, f"{LOAD_REQUESTS} requests of mixed lengths at once")
        target = EngineTarget(llm, limits)
        load = _serve_load(console, target, limits, vocabulary)
        _heading(console, "Speeds and their limits")
        with console.status("measuring decode and prefill"):
            single = measure(target, vocabulary, 1, 256, 48, num_iters=3, num_iters_warmup=1)
            batch = measure(target, vocabulary, 16, 32, 32, num_iters=2, num_iters_warmup=1)
        rows = [
            ("decode, batch 1", 1, single.decode),
            ("prefill, 256", 256, single.prefill),
            ("decode, batch 16", 16, batch.decode),
            ("mixed load, output", *load),
        ]
        console.print(_speed_table(rows))
    console.print("Limit: the bytes that must be read at the measured memory rate, or the FLOPs that must be done at "
                  "the measured matrix rate, whichever takes longer.", style="dim", highlight=False)
    if planned.in_codes and planned.plan.device == "cpu":
        console.print(CODES_NOTE, style="dim", highlight=False)
    if planned.plan.device == "cpu" and machine.last_level_cache >= planned.plan.weight_bytes:
        console.print(f"All {format_bytes(planned.plan.weight_bytes)} of weights fit the processor's last-level cache "
                      f"({format_bytes(machine.last_level_cache)}), which is faster than the measured memory: more "
                      "than 100% is possible.", style="dim", highlight=False)
    _heading(console, "Eight chats over a KV cache that holds one")
    show_chats(console, config)
    _heading(console, "Two memory configurations side by side, in the lab")
    show_comparison(console, config)
    console.print("Next: [bold]spill chat[/], [bold]spill plan[/], [bold]spill bench serve[/], "
                  "[bold]spill lab list[/]", highlight=False)


def _heading(console: Console, text: str) -> None:
    console.print()
    console.rule(f"[bold]{text}[/]", align="left")


def _print_machine(console: Console, machine: Machine, rates: Rates) -> None:
    from spillover.units import format_bytes, format_rate

    lines = [f"{machine.cpu}, {machine.cores} cores, {format_bytes(machine.memory)} of RAM "
             f"({format_bytes(machine.memory_available)} available)"]
    lines += [f"{device.name}, {format_bytes(device.total)} ({format_bytes(device.free)} free)"
              for device in machine.cuda]
    measured = [("memory read", rates.memory_read, "B/s"), ("float32 products", rates.float32, "FLOP/s"),
                ("bfloat16 products", rates.bfloat16, "FLOP/s"), ("host to device", rates.host_to_device, "B/s")]
    lines.append("measured now: " + ", ".join(f"{name} {format_rate(rate, unit)}" for name, rate, unit in measured
                                              if rate is not None))
    for line in lines:
        console.print(line, highlight=False, markup=False)


def _answer(console: Console, llm: LLM) -> None:
    from spillover.cli.chat.chat import timing_line
    from spillover.engine.requests.sampling_params import SamplingParams

    console.print(f"> {QUESTION}", style="bold", highlight=False)
    start, text, last = time.perf_counter(), "", None
    for last in llm.stream_chat([{"role": "user", "content": QUESTION}], SamplingParams(temperature=0, max_tokens=64)):
        console.file.write(last.outputs[0].text[len(text):])
        console.file.flush()
        text = last.outputs[0].text
    console.print()
    if last is not None:
        console.print(timing_line(last, time.perf_counter() - start), style="dim", highlight=False)


def _serve_load(console: Console, target: EngineTarget, limits: Limits,
                vocabulary: Vocabulary) -> tuple[int, Achieved]:
    """Run the load; return its output tokens, and how close its time came to the limit."""
    from spillover.bench.bounds import achieved, workload_bound
    from spillover.bench.throughput import offline, run_once
    from spillover.bench.workloads.workloads_synthetic import SyntheticWorkload, mixed_shapes

    shapes = mixed_shapes(LOAD_REQUESTS, LOAD_INPUTS, LOAD_OUTPUTS, LOAD_PREFIX)
    with console.status(f"answering {LOAD_REQUESTS} requests"):
        run = run_once(target, offline(SyntheticWorkload("mixed", shapes, vocabulary), 0), progress=False)
    sources = ", ".join(f"{count:,} {name}" for name, count in run.sources.items() if count)
    console.print(f"{run.prompt_tokens:,} prompt and {run.output_tokens:,} output tokens in {run.elapsed:.1f} s, "
                  f"{run.counters.steps} steps, {run.counters.preemptions} preemptions", highlight=False)
    console.print(f"prompt tokens by source: {sources}", highlight=False)
    bound = workload_bound(limits, run.requests, run.cached, target.max_num_seqs)
    return run.output_tokens, achieved(run.elapsed, bound, limits)


def _speed_table(rows: list[tuple[str, int, Achieved | None]]) -> Table:
    """Return a table of rows (name, tokens produced, time and limit)."""
    from spillover.bench.table import make_table
    from spillover.units import format_rate

    table = make_table("Speed", "what", "tok/s", "limit", "of limit", "bound by", text=("bound by",))
    for name, tokens, work in rows:
        if work is None:
            table.add_row(name, *["-"] * 4)
            continue
        rate = (format_rate(work.bytes_per_second, "B/s") if work.bound.name == "memory"
                else format_rate(work.flops_per_second, "FLOP/s"))
        table.add_row(name, f"{tokens / work.seconds:,.1f}", f"{tokens / work.bound.seconds:,.1f}",
                      f"{work.of_limit:.0%}", f"{work.bound.name}, {rate}")
    return table
