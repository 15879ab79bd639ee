"""Speed of a mixture's MLP on the device, from the router's scores to the sum, compared with the limit of its work.

    python benchmarks/gpu_mixture.py

One layer's experts of gpt-oss-120b (MXFP4) and Qwen3-30B-A3B (FP8, integers, bfloat16), random weights and routing,
batch-invariant unless --fast is given. Calls are timed in a CUDA graph; for few tokens each call in it routes
differently, so that few weights are in the cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import click
import torch
from gpu_workload import Figure, write
from torch import Tensor

from spillover.kernels.fields import LinearShape
from spillover.kernels.formats import mxfp4
from spillover.kernels.formats.base import Linear, Target
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.formats.fp8_block import FP8_BLOCK
from spillover.kernels.formats.grouped_int import GroupedInt
from spillover.kernels.formats.int_experts import IntExperts
from spillover.kernels.moe.experts import Experts
from spillover.kernels.moe.moe import mixture
from spillover.plan.measure import measure_rates
from spillover.plan.rates import Rates

# Format, hidden size, inner size, number of experts, experts per token, limit of the activation.
SHAPES: dict[str, tuple[str, int, int, int, int, float | None]] = {
    "gpt-oss-120b": ("mxfp4", 2880, 2880, 128, 4, 7.0),
    "Qwen3-30B-A3B fp8": ("fp8", 2048, 768, 128, 8, None),
    "Qwen3-30B-A3B int4": ("int4", 2048, 768, 128, 8, None),
    "Qwen3-30B-A3B int8": ("int8", 2048, 768, 128, 8, None),
    "Qwen3-30B-A3B bfloat16": ("dense", 2048, 768, 128, 8, None),
}
TOKENS = (1, 2, 4, 8, 16, 64, 256, 512, 2048, 8192)


def stack(form: str, experts: int, rows: int, columns: int, biased: bool) -> Experts:
    bias = torch.randn(experts, rows, dtype=torch.bfloat16, device="cuda") if biased else None
    shape = LinearShape((rows,), columns)
    if form == "dense":
        weight = torch.empty(experts, rows, columns, dtype=torch.bfloat16, device="cuda")
        return Experts(Linear(DENSE, shape, (weight.normal_(std=columns**-0.5),)), bias)
    if form.startswith("int"):
        kept = IntExperts(GroupedInt(int(form.removeprefix("int")), 128, "bfloat16"))
        target, random = Target("bfloat16", torch.device("cuda")), torch.Generator("cuda").manual_seed(0)
        return Experts(Linear(kept, shape, kept.dummy(shape, experts, target, random)), bias)
    codes = torch.randint(0, 256, (experts, rows, columns // (2 if form == "mxfp4" else 1)), dtype=torch.uint8,
                          device="cuda")
    if form == "mxfp4":
        groups = mxfp4.padded(columns // mxfp4.GROUP)
        scales = torch.randint(117, 123, (experts, rows, groups), dtype=torch.uint8, device="cuda")
        return Experts(Linear(mxfp4.MXFP4, shape, (codes, scales)), bias)
    scales = torch.rand(experts, -(-rows // 128), -(-columns // 128), device="cuda") * columns**-0.5
    return Experts(Linear(FP8_BLOCK, shape, (codes.bitwise_and_(0xBF).view(torch.float8_e4m3fn), scales)), bias)


def milliseconds(call: Callable[[Tensor, Tensor], Tensor], inputs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the time of one call: the median of ten replays of a graph that calls with each of the inputs."""
    for each in inputs:
        call(*each)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in inputs:
            call(*each)
    times = []
    for _ in range(20):  # the first ten are a warm-up, in which clocks rise
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(inputs))
    return statistics.median(times[10:])


def ordered(experts: Experts) -> Experts:
    weight = experts.weight
    return Experts(Linear(weight.format.batch_invariant(), weight.shape, weight.tensors), experts.bias)


def layer(name: str, rates: Rates, fast: bool) -> list[Figure]:
    form, hidden, inner, experts, k, limit = SHAPES[name]
    first = stack(form, experts, 2 * inner, hidden, limit is not None)
    second = stack(form, experts, hidden, inner, limit is not None)
    if not fast:
        first, second = ordered(first), ordered(second)
    parts = (first.values, first.scales, second.values, second.scales)
    nbytes = sum(part.nbytes for part in parts if part is not None) / experts

    def call(x: Tensor, scores: Tensor) -> Tensor:
        return mixture(x, scores, first, second, k, True, limit)

    figures = []
    for tokens in TOKENS:
        inputs = [(torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda"),
                   torch.randn(tokens, experts, dtype=torch.bfloat16, device="cuda"))
                  for _ in range(24 if tokens <= 8 else 4)]
        touched = statistics.mean(scores.topk(k).indices.unique().numel() for _, scores in inputs)
        took = milliseconds(call, inputs)
        memory = touched * nbytes / rates.memory_read * 1e3
        compute = 6 * tokens * k * hidden * inner / rates.flops("bfloat16") * 1e3
        least, bound = max(memory, compute), "memory" if memory >= compute else "compute"
        details = {"model": name, "tokens": tokens, "bound": bound}
        figures.append(Figure(f"{name}, {tokens} tokens", "us", [1e3 * took], 1e3 * least, True, details))
    return figures


@click.command()
@click.option("--output", default=None, metavar="FILE", help="Write the result; 'results' is benchmarks/results/.")
@click.option("--fast", is_flag=True, help="Compute as the engine does with --fast.")
@click.option("--model", "models", multiple=True, type=click.Choice(list(SHAPES)), help="Only this; repeatable.")
@torch.inference_mode()
def main(output: str | None, fast: bool, models: tuple[str, ...]) -> None:
    rates = measure_rates("cuda")
    write("gpu-mixture", [figure for name in models or SHAPES for figure in layer(name, rates, fast)], output)


if __name__ == "__main__":
    main()
