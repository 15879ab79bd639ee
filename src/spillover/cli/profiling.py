"""`spill bench latency --profile`: where the time of a prefill and a decode step goes, each part with its limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from spillover.bench.table import make_table
from spillover.bench.target import BenchRequest, Bound, Generates, Limits
from spillover.bench.workloads.workloads import Vocabulary
from spillover.engine.profiling.host_clock import HOST_PARTS
from spillover.engine.profiling.step_profile import IDLE, PhaseProfile, profile_steps
from spillover.plan.part_limits import PartLimits

if TYPE_CHECKING:
    from rich.console import Console

    from spillover.engine.loop import Engine
    from spillover.engine.planned import PlannedModel

SLOWEST = 8  # number of kernels listed by name
WARM_UP_TOKENS = 3
PREFILLS = 5  # number of prompt steps averaged; the first runs on a device that was idle


def profile_batch(engine: Engine, target: Generates, planned: PlannedModel, limits: Limits, vocabulary: Vocabulary,
                  batch_size: int, input_len: int, output_len: int, folder: str | None,
                  console: Console) -> dict[str, Any]:
    """Profile one batch, print its tables and return them for a JSON file. `folder`: where to write a trace."""
    plan = planned.plan
    rng = np.random.default_rng([planned.config.seed, batch_size, input_len, output_len])

    def generate(length: int) -> None:
        target.generate([BenchRequest(vocabulary.draw(rng, input_len), length) for _ in range(batch_size)])

    def run() -> None:
        for _ in range(PREFILLS - 1):
            generate(1)
        generate(output_len)

    trace = None if folder is None else Path(folder) / f"latency-{batch_size}x{input_len}+{output_len}.json.gz"
    phases = profile_steps(engine, plan.device, run, lambda: generate(min(output_len, WARM_UP_TOKENS)), trace)
    parts = PartLimits(planned.model_config, planned.specs, plan.dtype, plan.kv_cache_dtype)
    found = {}
    for phase, profile in phases.items():
        title = f"A {phase} step, batch {batch_size}, {input_len} in"
        bounds = part_bounds(profile, parts, limits)
        console.print(parts_table(profile, bounds, title), host_table(profile), kernels_table(profile), sep="\n")
        found[phase] = as_dict(profile, bounds)
    if trace is not None:
        console.print(f"Trace for https://ui.perfetto.dev: {trace}", highlight=False)
    return found


def part_bounds(profile: PhaseProfile, parts: PartLimits, limits: Limits) -> dict[str, Bound]:
    """Return the least time of each part of a mean step; that of the whole step has the key ""."""
    by_part: dict[str, list[Bound]] = {}
    for batch in profile.batches:
        for part, limit in parts.step(batch).items():
            memory, compute = limit.bytes / limits.memory_rate, limit.flops / limits.matrix_rate
            name = "memory" if memory >= compute else "compute"
            by_part.setdefault(part, []).append(Bound(max(memory, compute), limit.bytes, limit.flops, name))
        by_part.setdefault("", []).append(limits.step(batch))
    return {part: _mean(bounds) for part, bounds in by_part.items()}


def _mean(bounds: Sequence[Bound]) -> Bound:
    count = len(bounds)
    return Bound(sum(each.seconds for each in bounds) / count, sum(each.bytes for each in bounds) / count,
                 sum(each.flops for each in bounds) / count, bounds[0].name)


def as_dict(profile: PhaseProfile, bounds: Mapping[str, Bound]) -> dict[str, Any]:
    return {
        "steps": profile.steps,
        "tokens": profile.num_tokens,
        "step_us": profile.total_seconds * 1e6,
        "profiled_step_us": profile.profiled * 1e6,
        "limit_us": bounds[""].seconds * 1e6,
        "kernels": sum(part.kernels for part in profile.parts.values()),
        "parts": {name: {"us": part.seconds * 1e6, "kernels": part.kernels, "share": part.seconds / profile.profiled,
                         "limit_us": bounds[name].seconds * 1e6 if name in bounds else None,
                         "bound": bounds[name].name if name in bounds else None}
                  for name, part in profile.parts.items()},
        "host_us": {part: seconds * 1e6 for part, seconds in profile.host.items()},
        "slowest": [{"kernel": name, "part": part, "launches": launches, "us": seconds * 1e6}
                    for name, part, launches, seconds in profile.slowest[:SLOWEST]],
    }


def parts_table(profile: PhaseProfile, bounds: Mapping[str, Bound], title: str) -> Table:
    title += f", {profile.num_tokens:,.0f} tokens; mean of {profile.steps}"
    table = make_table(title, "part", "kernels", "us", "share", "limit us", "of limit", "bound", text=("bound",))
    for name, part in profile.parts.items():
        count = "" if name == IDLE else f"{part.kernels:,.0f}"
        table.add_row(name, count, f"{part.seconds * 1e6:,.1f}", f"{part.seconds / profile.profiled:.1%}",
                      *_limit_cells(bounds.get(name), part.seconds), end_section=name == IDLE)
    kernels = sum(part.kernels for part in profile.parts.values())
    table.add_row("step, profiled", f"{kernels:,.0f}", f"{profile.profiled * 1e6:,.1f}", "100.0%",
                  *_limit_cells(bounds[""], profile.profiled))
    table.add_row("step, not profiled", "", f"{profile.total_seconds * 1e6:,.1f}", "",
                  *_limit_cells(bounds[""], profile.total_seconds))
    return table


def host_table(profile: PhaseProfile) -> Table:
    table = make_table("On the host, while the device computes", "part", "us", "share")
    for part in HOST_PARTS:
        seconds = profile.host[part]
        table.add_row(part, f"{seconds * 1e6:,.1f}", f"{seconds / profile.total_seconds:.1%}")
    return table


def kernels_table(profile: PhaseProfile) -> Table:
    table = Table(title="Kernels that took the most time", title_justify="left", title_style="bold")
    table.add_column("kernel", max_width=80, no_wrap=True)
    table.add_column("part")
    for heading in ("launches", "us", "share"):
        table.add_column(heading, justify="right")
    for name, part, launches, seconds in profile.slowest[:SLOWEST]:
        table.add_row(name, part, f"{launches:,.0f}", f"{seconds * 1e6:,.1f}", f"{seconds / profile.profiled:.1%}")
    return table


def _limit_cells(bound: Bound | None, seconds: float) -> list[str]:
    if bound is None or seconds <= 0:
        return ["", "", ""]
    return [f"{bound.seconds * 1e6:,.1f}", f"{bound.seconds / seconds:.0%}", bound.name]
