"""`spill eval`: tasks on a local model or behind a URL; `spill eval compare`: two results, item by item."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spillover.cli.options import engine_options
from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError

if TYPE_CHECKING:
    from spillover.eval.compare import Difference
    from spillover.eval.divergence import Reference
    from spillover.eval.metrics import Estimate
    from spillover.eval.target import Target
    from spillover.eval.tasks.base import Item, Task

URLS = ("http://", "https://")
DEFAULT = "SmolLM2-135M-Instruct"
# Flags that --reference resets: the reference is the model as stored, with unquantised KV.
QUANTISES = ("kv_cache_dtype", "spill_dtype", "quantization", "calibrate")
# Flags that change a model's numbers, and are therefore part of the name of results; memory plans do not.
CHANGES_NUMBERS = (*QUANTISES, "weight_codes", "dtype", "device", "fast", "load_format", "tokenizer", "chat_template")


class EvalGroup(click.Group):
    """A group that runs tasks unless the first word is a command: for `spill eval MODEL` and `spill eval compare`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else ["run", *args])

    def list_commands(self, ctx: click.Context) -> list[str]:
        return ["compare"]


class RunContext(click.Context):
    @property
    def command_path(self) -> str:
        return self.parent.command_path if self.parent is not None else super().command_path


class RunCommand(click.Command):
    context_class = RunContext


@click.group("eval", cls=EvalGroup)
def evaluate() -> None:
    """Evaluate a model on tasks, or a quantised model against the original."""


@evaluate.command("run", cls=RunCommand)
@click.option("--task", "tasks", multiple=True, required=True, metavar="NAME[=FILE]",
              help="perplexity, hellaswag, arc-easy, arc-challenge, mmlu, gsm8k, gsm8k-chat or ifeval; may be given "
                   "more than once. FILE replaces the task's default file in --data.")
@click.option("--data", default=".", show_default=True, metavar="DIR", help="Folder with the tasks' files.")
@click.option("--limit", type=click.IntRange(min=1), default=None,
              help="Run only the first N items of each task, or windows of perplexity. [default: all]")
@click.option("--output", default=None, metavar="FILE.jsonl",
              help="Write every item's result as soon as it is available; the same command continues from there.")
@click.option("--concurrency", type=click.IntRange(min=1), default=32, show_default=True,
              help="Number of concurrent items.")
@click.option("--window", type=click.IntRange(min=1), default=1024, show_default=True,
              help="perplexity: maximum tokens of context.")
@click.option("--stride", type=click.IntRange(min=1), default=None,
              help="perplexity: tokens scored per window; fewer give each token more context. [default: --window]")
@click.option("--reference", default=None, metavar="MODEL|URL",
              help="perplexity: also measure KL divergence from this model and top-1 agreement with it, on the same "
                   "tokens. It runs first, with the same flags but without quantising weights or KV.")
@click.option("--reference-dir", default=None, metavar="DIR",
              help="Keep the reference's results in this folder and reuse them. [default: a folder that is deleted]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--api-key", default=None, help="API key to send to a URL. [default: OPENAI_API_KEY of the environment]")
@engine_options()
def run(config: EngineConfig, tasks: tuple[str, ...], data: str, limit: int | None, output: str | None,
        concurrency: int, window: int, stride: int | None, reference: str | None, reference_dir: str | None,
        as_json: bool, api_key: str | None) -> None:
    """Run tasks on a model, or on any OpenAI-compatible server by its URL, and show scores with their 95% intervals.

    `spill eval compare A.jsonl B.jsonl` compares two results, item by item. docs/eval.md defines each number.

    \b
    Examples:
      spill eval --task hellaswag --data data --limit 200 --output smollm2.jsonl
      spill eval http://127.0.0.1:8000 --task gsm8k --task ifeval --data data
      spill eval ./model --task perplexity=wiki.txt --kv-cache-dtype fp8 --reference ./model
      spill eval compare full.jsonl fp8.jsonl
    """
    from spillover.eval.results import Results
    from spillover.eval.run import run as run_task
    from spillover.eval.run import summary
    from spillover.eval.tasks.named import open_task

    names = [task.partition("=")[0] for task in tasks]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SpilloverError(f"--task {twice} was given twice; run it on one file at a time, each with an --output")
    if reference is not None and "perplexity" not in names:
        raise SpilloverError("--reference compares distributions on the text of the task perplexity: add --task "
                             "perplexity=FILE")
    key = api_key or os.environ.get("OPENAI_API_KEY")
    with contextlib.ExitStack() as left:
        against = None if reference is None else left.enter_context(_reference(config, reference, reference_dir))
        opened = [open_task(task, Path(data), window, stride or window, against) for task in tasks]
        results = Results(None if output is None else Path(output))
        left.callback(results.close)
        if against is not None and reference is not None:
            perplexity = next(task for task in opened if task.name == "perplexity")
            _prepare(against, perplexity, _reference_config(config, reference), key, limit, concurrency)
        target = _open(config, key)
        left.callback(target.close)
        done: list[tuple[Task, list[Item]]] = []
        for task in opened:
            items = list(task.items(target))[:limit]
            run_task(task, target, items, results, concurrency)
            done.append((task, items))
        scores = [(task.name, summary(task, items, results)) for task, items in done]
        if as_json:
            click.echo(json.dumps({"model": target.name, "scores": [
                {"task": name, "metric": metric, **dataclasses.asdict(found)}
                for name, rows in scores for metric, found in rows]}))
        else:
            _print_scores(target.name, scores)


@evaluate.command()
@click.argument("base")
@click.argument("other")
def compare(base: str, other: str) -> None:
    """Compare two results of spill eval on their common items: is OTHER better than BASE, worse, or is no difference
    shown?

    \b
    Example:
      spill eval compare full.jsonl fp8.jsonl
    """
    from spillover.eval.compare import compare as compared
    from spillover.eval.results import Results
    from spillover.eval.tasks.named import metrics_of

    first, second = Results.load(Path(base)), Results.load(Path(other))
    shared = [task for task in first.settings if task in second.settings]
    if not shared:
        raise SpilloverError(f"'{base}' has {', '.join(first.settings)} and '{other}' has "
                             f"{', '.join(second.settings)}: no task in common")
    for task in shared:
        _check_alike(task, first.settings[task], second.settings[task])
    metrics = {task: [metric for metric in metrics_of(task, first.settings[task])
                      if metric.compared and metric in metrics_of(task, second.settings[task])] for task in shared}
    found = compared([(task, metrics[task], first.items[task], second.items[task]) for task in shared])
    _print_differences(found, base, other)


def _check_alike(task: str, first: dict[str, Any], second: dict[str, Any]) -> None:
    both = "reference" in first and "reference" in second  # otherwise only perplexity is compared
    free = ("model", "data", *(() if both else ("reference", "divergence")))
    for name in {**first, **second}:
        if name not in free and first.get(name) != second.get(name):
            raise SpilloverError(f"the two results of {task} cannot be compared: {name} is {first.get(name)!r} in one "
                                 f"and {second.get(name)!r} in the other")


def _open(config: EngineConfig, api_key: str | None) -> Target:
    if config.model is None or not config.model.startswith(URLS):
        from spillover.cli.loading import open_llm
        from spillover.eval.in_process import EngineTarget

        return EngineTarget(open_llm(config), _named(config))
    from spillover.eval.served import ServedTarget
    from spillover.models.tokenizer import load_tokenizer

    for item in dataclasses.fields(config):
        if item.name not in ("model", "tokenizer") and getattr(config, item.name) != item.default:
            raise SpilloverError(f"--{item.name.replace('_', '-')} is for a model in this process; give it to the "
                                 f"server at {config.model}")
    return ServedTarget(config.model, None if config.tokenizer is None else load_tokenizer(config.tokenizer), api_key)


def _named(config: EngineConfig) -> str:
    """Return the model and the flags that change its numbers, as on the command line."""
    given = [(item.name, getattr(config, item.name)) for item in dataclasses.fields(config)
             if item.name in CHANGES_NUMBERS and getattr(config, item.name) != item.default]
    return " ".join([config.model or DEFAULT, *(f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
                                                for name, value in given)])


@contextlib.contextmanager
def _reference(config: EngineConfig, model: str, folder: str | None) -> Iterator[Reference]:
    from spillover.eval.divergence import FullReference, TopReference

    served = model.startswith(URLS) or (config.model or "").startswith(URLS)
    with contextlib.ExitStack() as left:
        place = folder or left.enter_context(tempfile.TemporaryDirectory(prefix="spill-eval-"))
        yield (TopReference if served else FullReference)(Path(place), _named(_reference_config(config, model)))


def _reference_config(config: EngineConfig, model: str) -> EngineConfig:
    """Return the reference's flags: the given ones, except those that change the model's numbers."""
    kept = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)
            if item.name not in QUANTISES and not (model.startswith(URLS) and item.name != "tokenizer")}
    return EngineConfig.from_flags(**kept | {"model": model})


def _prepare(reference: Reference, task: Task, config: EngineConfig, api_key: str | None, limit: int | None,
             concurrency: int) -> None:
    if reference.has(task.settings, limit):
        return
    target = _open(config, api_key)
    try:
        every = task.items(target)
        items = every[:limit]
        reference.prepare(target, {item.id: item.ask.prompt for item in items}, concurrency)
        reference.note(task.settings, len(items), len(items) == len(every))
    finally:
        target.close()


def _print_scores(model: str, tasks: list[tuple[str, list[tuple[str, Estimate]]]]) -> None:
    from spillover.bench.table import make_table
    from spillover.cli.bench.measuring import make_console

    table = make_table(model, "task", "metric", "value", "95% interval", "items", "interval by",
                       text=("metric", "interval by"))
    for name, scores in tasks:
        for metric, found in scores:
            table.add_row(name, metric, _number(found.value), _interval(found.low, found.high),
                          f"{found.items:,}", found.method)
    make_console().print(table)


def _print_differences(found: list[Difference], base: str, other: str) -> None:
    from spillover.bench.table import make_table
    from spillover.cli.bench.measuring import make_console

    level = 100 * (1 - 0.05 / len(found))
    table = make_table(f"{other} against {base}", "task", "metric", "base", "other",
                       f"{level:.4g}% interval of other - base", "right alone", "p", "items", "verdict",
                       text=("metric", "verdict"),
                       caption="right alone: items that only base / only other has right. p: McNemar's exact test "
                               "where there are such, else a paired bootstrap.")
    for each in found:
        alone = "" if each.only_base is None else f"{each.only_base} / {each.only_other}"
        table.add_row(each.task, each.metric, _number(each.base), _number(each.other),
                      _interval(each.low, each.high), alone, f"{each.p:.2g}", f"{each.items:,}",
                      each.verdict)
    make_console().print(table)


def _interval(low: float, high: float) -> str:
    return f"{_number(low)} to {_number(high)}" if math.isfinite(high) else "unknown: one item"


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) >= 0.01 or value == 0 else f"{value:.3g}"
