"""`spill bench latency --profile DIR`: one more batch, profiled, and where its time went beside what it had to take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from spillover.bench.table import make_table
from spillover.bench.target import BenchRequest, Generates, Limits
from spillover.bench.workloads.workloads import Vocabulary
from spillover.engine.profiling.profile import IDLE, KINDS, OTHER, Breakdown, profiled
from spillover.plan.roofline import keys_seen
from spillover.plan.shapes import ModelShape, model_shape

if TYPE_CHECKING:
    from rich.console import Console

    from spillover.engine.assemble import PlannedModel

SLOWEST = 8  # kernels that are listed by name


def profile_batch(target: Generates, planned: PlannedModel, limits: Limits, vocabulary: Vocabulary, batch_size: int,
                  input_len: int, output_len: int, folder: str, console: Console) -> Breakdown:
    rng = np.random.default_rng([planned.config.seed, batch_size, input_len, output_len])
    batch = [BenchRequest(vocabulary.draw(rng, input_len), output_len) for _ in range(batch_size)]
    name = f"latency-{batch_size}x{input_len}+{output_len}"
    with profiled(Path(folder), name, planned.plan.device) as breakdown:
        target.generate(batch)
    shape = model_shape(planned.model_config, planned.specs, planned.plan.dtype)
    least = least_seconds(shape, limits, batch_size, input_len, output_len)
    console.print(_kinds_table(breakdown, least, f"Where the time went, batch {batch_size}, {input_len} in, "
                                                 f"{output_len} out"))
    console.print(_kernels_table(breakdown))
    console.print(f"Trace for https://ui.perfetto.dev: {breakdown.trace}", highlight=False)
    return breakdown


def least_seconds(shape: ModelShape, limits: Limits, batch_size: int, input_len: int,
                  output_len: int) -> dict[str, float]:
    """Return the least time of each kind of work by itself: one prefill, then a decode for each token."""
    least = {"attention": 0.0, "GEMM": 0.0, "MoE": 0.0}
    steps = [(input_len, 0)] + [(1, input_len + drawn) for drawn in range(output_len - 1)]
    for new, context in steps:
        tokens = new * batch_size
        read = flops = 0.0
        for window, layers in shape.windows:
            cached = context if window is None else min(context, window - 1)
            read += batch_size * layers * (cached + new) * shape.kv_layer_bytes
            flops += batch_size * layers * 4 * shape.num_heads * shape.head_dim * keys_seen(new, context, window)
        least["attention"] += _seconds(limits, read, flops)
        least["GEMM"] += _seconds(limits, shape.layer_bytes + shape.head_bytes,
                                  2.0 * shape.layer_params * tokens + 2.0 * shape.head_params * batch_size)
        experts = shape.expert_layers * shape.distinct_experts(tokens) * shape.expert_bytes
        params = shape.expert_layers * shape.experts_per_token * shape.expert_params
        least["MoE"] += _seconds(limits, experts, 2.0 * params * tokens)
    return least


def _seconds(limits: Limits, read: float, flops: float) -> float:
    return max(read / limits.memory_rate, flops / limits.matrix_rate)


def _kinds_table(breakdown: Breakdown, least: dict[str, float], title: str) -> Table:
    table = make_table(title, "kind", "time", "share", "limit", "of limit")
    for kind in (*(kind for kind, _ in sorted(KINDS)), OTHER, IDLE):
        seconds = breakdown.seconds.get(kind, 0.0)
        if seconds == 0.0 and kind != IDLE:
            continue
        limit = least.get(kind)
        cells = [f"{limit * 1e3:,.2f} ms", f"{limit / seconds:.0%}"] if limit else ["", ""]
        table.add_row(kind, f"{seconds * 1e3:,.2f} ms", f"{breakdown.share(kind):.1%}", *cells)
    table.add_row("all", f"{breakdown.whole * 1e3:,.2f} ms", "100.0%", "", "")
    return table


def _kernels_table(breakdown: Breakdown) -> Table:
    table = Table(title="Kernels that took most", title_justify="left")
    table.add_column("kernel", max_width=80, no_wrap=True)
    table.add_column("kind")
    for heading in ("calls", "time", "share"):
        table.add_column(heading, justify="right")
    for name, kind, calls, seconds in breakdown.slowest(SLOWEST):
        table.add_row(name, kind, f"{calls:,}", f"{seconds * 1e3:,.2f} ms", f"{seconds / breakdown.whole:.1%}")
    return table
