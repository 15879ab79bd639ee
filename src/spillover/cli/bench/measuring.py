"""Functions shared by the bench commands: the console, the measured limits, and result files."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import click

from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError

if TYPE_CHECKING:
    from rich.console import Console

    from spillover.bench.workloads.workloads import Vocabulary
    from spillover.cli.bench.targets import RooflineLimits
    from spillover.engine.planned import PlannedModel


CODES_NOTE = ("Weights stay in their file's codes: byte counts are those of the codes, and products with codes can "
              "exceed the float32 matrix rate that they are compared with (--weight-codes widen avoids both).")


def make_console() -> Console:
    """Make a console. Output to a pipe has no width, and gets one that does not truncate tables."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=160)


def measure_limits(planned: PlannedModel, console: Console) -> RooflineLimits:
    """Measure the machine once per command, before anything is loaded, so that all rows have the same limits."""
    from spillover.bench.report import print_limits
    from spillover.cli.bench.targets import RooflineLimits
    from spillover.cli.loading import timed_rates
    from spillover.plan.roofline import Roofline
    from spillover.plan.shapes import model_shape

    shape = model_shape(planned.model_config, planned.specs, planned.plan.dtype, kv_dtype=planned.plan.kv_cache_dtype)
    limits = RooflineLimits(Roofline(shape, timed_rates(planned.plan.device)))
    print_limits(console, limits)
    if planned.in_codes and planned.plan.device == "cpu":
        console.print(CODES_NOTE, highlight=False)
    return limits


def make_vocabulary(planned: PlannedModel) -> Vocabulary:
    """Return the tokens for random prompts, without special ones if the model's tokenizer is available."""
    from spillover.bench.workloads.workloads import Vocabulary
    from spillover.errors import CheckpointError
    from spillover.models.tokenizer import load_tokenizer

    special: frozenset[int] = frozenset()
    if not planned.config.skip_tokenizer_init:
        with contextlib.suppress(CheckpointError):
            special = load_tokenizer(planned.config.tokenizer or planned.path).special_ids
    return Vocabulary(planned.model_config.vocab_size, special)


def write_results(path: str | None, config: EngineConfig, results: list[dict[str, Any]],
                  extra: dict[str, Any] | None = None) -> None:
    """Write results as JSON. `extra`: entries that belong to no single result."""
    if path is None:
        return
    import dataclasses

    from spillover.bench.provenance import provenance
    from spillover.bench.report import write_json
    from spillover.plan.hardware import probe

    header = {**provenance(dataclasses.asdict(probe())), "engine": config.shown(), **(extra or {})}
    write_json(path, header, results)
    click.echo(f"written to {path}")


def check_counts(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise SpilloverError(f"--{name.replace('_', '-')} must be at least 1; got {value}")
