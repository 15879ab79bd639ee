"""Mixtures larger than the memory they may use: decode at batch 1 and prefill of 512 tokens, with every strategy.

    python benchmarks/big_models.py --model gpt-oss-120b --gpu-memory 32GB --log gptoss.route.csv --output results
    python benchmarks/big_models.py --model qwen3-30b-a3b-fp8 --half --log qwen.route.csv --output results
    python benchmarks/big_models.py --strategies "" --sweep 8,16,24,32,40,48,56,64 --log gptoss.route.csv

Weights are random, of the true shapes, so the router's own choice of experts ("router") is arbitrary. Where the device
looks up experts itself, routing is replayed instead: "uniform" rows choose every expert equally often, "replayed" rows
repeat a log of a real model's routing, extended to the model's number of experts per token by the log's frequencies.
The peak device memory is read after every row and compared with the budget.
"""

from __future__ import annotations

import contextlib
import gc
import io
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from gpu_workload import MODELS, Figure, opened, write
from mixture_workload import PREFILL, decode_rate, prefill_rate

from spillover import LLM
from spillover.engine.cuda.cuda_runner import CudaStep
from spillover.engine.cuda.paged_experts import PagedExperts
from spillover.engine.requests.request import Request
from spillover.engine.step import StepResult
from spillover.errors import SpilloverError
from spillover.memory.routing import extended, read_log, uniform
from spillover.memory.transfer.host_pool import HostPool
from spillover.models.registry import architecture
from spillover.plan.shapes import model_shape
from spillover.units import parse_bytes

STRATEGIES = ("demand", "sequential", "pinned", "host-experts", "experts", "experts:lfru")


@dataclass(frozen=True)
class Case:
    model: str
    budget: int
    strategy: str
    repeats: int
    decode_tokens: int
    log: str | None


def measure(case: Case, flags: dict[str, Any]) -> Iterator[Figure]:
    """Yield the rows of one strategy: prefill, and decode with each routing."""
    strategy, _, policy = case.strategy.partition(":")
    gc.collect()  # frees the model measured before
    start = time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with opened(case.model, gpu_memory=str(case.budget), weights=strategy, policy=policy or "lru", max_num_seqs=8,
                max_model_len=4096, max_num_batched_tokens=2048, enable_prefix_caching=False, **flags) as llm:
        weights, placement = llm.engine.runner.weights, llm.plan.placement  # type: ignore[attr-defined]
        torch.cuda.reset_peak_memory_stats()  # excludes the buffers that planning used to measure the machine
        loaded = time.perf_counter() - start
        print(f"{case.strategy}: loaded in {loaded:.1f} s", flush=True)
        rng = random.Random(0)
        prefill_rate(llm, rng)
        decode_rate(llm, rng, 4)
        paged = weights.experts
        # Routing can be replayed where the device looks up experts itself; elsewhere the router chooses.
        routings = ["router"]
        if isinstance(paged, PagedExperts):
            routings = ["uniform", "replayed"] if case.log is not None else ["uniform"]
        count = min(case.decode_tokens, 6) if strategy == "sequential" else case.decode_tokens
        common = {"strategy": strategy, "policy": policy or "lru", "budget": case.budget, "load_seconds": loaded,
                  "quota": placement.quota if placement else 0, "model": case.model}
        yield figure(llm, case, common, "prefill", "router", lambda: prefill_rate(llm, rng), before, PREFILL)
        for routing in routings:
            if isinstance(paged, PagedExperts) and routing != "router":
                replay(paged, case, llm, routing)
            decode_rate(llm, rng, 64 if routing == "replayed" else min(16, count))  # so that slots follow the routing
            yield figure(llm, case, common, "decode", routing, lambda: decode_rate(llm, rng, count), before, count)


def figure(llm: LLM, case: Case, common: dict[str, Any], phase: str, routing: str, rate: Any,
           before: int, count: int) -> Figure:
    weights = llm.engine.runner.weights  # type: ignore[attr-defined]
    earlier = weights.traffic()
    with host_time(llm) as host:
        rates = [rate() for _ in range(case.repeats)]
    torch.cuda.synchronize()
    traffic = weights.traffic().since(earlier)
    predicted = llm.plan.placement.predicted if llm.plan.placement else None
    peak = torch.cuda.max_memory_allocated() - before
    if peak > case.budget:
        raise SystemExit(f"peak device memory {peak:,} is above the budget {case.budget:,}")
    tokens = case.repeats * count
    limit = roof = None
    if predicted is not None:
        limit = predicted.prefill_tokens_per_second if phase == "prefill" else predicted.decode_tokens_per_second
        roof = predicted.prefill_roof if phase == "prefill" else predicted.decode_roof
    details = {**common, "routing": routing, "phase": phase, "tokens": count, "peak_bytes": peak, "roof": roof,
               "hit_rate": traffic.hit_rate,
               "hosted": traffic.expert_hosted / tokens,
               "bytes_moved_per_token": traffic.bytes_moved / tokens,
               "predicted": limit, "predicted_routing": "uniform", "host_ms_per_step": statistics.median(host),
               "host_ms_p90": statistics.quantiles(host, n=10)[-1]}
    name = f"{phase}, {case.strategy}, {routing}, {case.budget / 1e9:.1f} GB"
    made = Figure(name, "tok/s", rates, limit or max(rates), details=details)
    hits = details["hit_rate"]
    print(f"{name}: {made.value:.1f} tok/s, {made.percent_of_limit:.0f}% of {roof}, hits "
          f"{'-' if hits is None else f'{hits:.1%}'}, {details['bytes_moved_per_token'] / 1e6:.0f} MB per token, host "
          f"{details['host_ms_per_step']:.2f} ms per step, peak {peak / 1e9:.2f} GB", flush=True)
    return made


@contextlib.contextmanager
def host_time(llm: LLM) -> Iterator[list[float]]:
    """Yield a list that receives the host's milliseconds of each step: its duration minus the wait for the device."""
    found: list[float] = []
    waited, result, step = 0.0, CudaStep.result, llm.engine.step

    def waiting(launched: CudaStep) -> StepResult:
        nonlocal waited
        start = time.perf_counter()
        if launched._ended is not None:
            launched._ended.synchronize()
        waited += time.perf_counter() - start
        return result(launched)

    def timed() -> list[Request]:
        start, before = time.perf_counter(), waited
        changed = step()
        found.append(1e3 * (time.perf_counter() - start - (waited - before)))
        return changed

    with mock.patch.object(CudaStep, "result", waiting), mock.patch.object(llm.engine, "step", timed):
        yield found


def replay(experts: PagedExperts, case: Case, llm: LLM, routing: str) -> None:
    config = architecture(MODELS[case.model]).config(MODELS[case.model])
    layers, wanted, k = experts.table.layers, config.num_experts, config.experts_per_token
    if routing == "uniform":
        trace = uniform(256, layers, wanted, k)
    else:
        assert case.log is not None
        trace = extended(read_log(case.log), wanted, k, layers)
    experts.replay(torch.tensor(trace, dtype=torch.int32, device="cuda"))
    llm.engine.runner.forget_graphs()  # type: ignore[attr-defined]  # captured graphs contain the earlier routing


def half_budget(model: str) -> int:
    """Return the bytes of all weights but half of the experts, a short context, workspace and stream buffers."""
    built = architecture(MODELS[model])
    config = built.config(MODELS[model])
    shape = model_shape(config, built.weight_specs(config), "bfloat16")
    experts = shape.expert_bytes * shape.num_experts * shape.expert_layers
    return shape.weight_bytes - experts // 2 + (17 << 27)


@click.command()
@click.option("--model", default="gpt-oss-120b", show_default=True)
@click.option("--gpu-memory", default="32GB", show_default=True)
@click.option("--half", is_flag=True, help="Set the budget to all weights but half of the experts.")
@click.option("--strategies", default=",".join(STRATEGIES), show_default=True)
@click.option("--sweep", default=None, metavar="GB,...", help="Then measure these budgets too, with --weights experts.")
@click.option("--log", default=None, help="A routing log to replay.")
@click.option("--decode-tokens", default=128, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--seconds", default=300.0, show_default=True, help="Skip strategies that would start later.")
@click.option("--host-memory", default=None)
@click.option("--name", default=None)
@click.option("--output", default=None)
def main(model: str, gpu_memory: str, half: bool, strategies: str, sweep: str | None, log: str | None,
         decode_tokens: int, repeats: int, seconds: float, host_memory: str | None, name: str | None,
         output: str | None) -> None:
    HostPool.keeps = True
    end = time.monotonic() + seconds
    budget = half_budget(model) if half else parse_bytes(gpu_memory)
    flags = {} if host_memory is None else {"host_memory": host_memory}

    def rows(name: str, wanted: Sequence[Case], path: str | None) -> None:
        figures: list[Figure] = []
        for case in wanted:
            if time.monotonic() > end:
                print(f"skipped for lack of time: {case.strategy} at {case.budget / 1e9:.1f} GB", flush=True)
                continue
            try:
                figures += measure(case, flags)
            except SpilloverError as error:
                print(f"{case.strategy} at {case.budget / 1e9:.1f} GB: {error}", flush=True)
            if path is not None and figures:
                with contextlib.redirect_stdout(io.StringIO()):
                    write(name, figures, path)

    rows(name or ("qwen3-30b-a3b-half" if half else f"{model}-{gpu_memory.lower()}"),
         [Case(model, budget, each, repeats, decode_tokens, log) for each in strategies.split(",") if each], output)
    if sweep is not None:
        sweep_output = None if output is None else "results" if output == "results" else str(
            Path(output).with_name("budget-sweep.json"))
        rows("budget-sweep", [Case(model, int(each) * 10**9, "experts", repeats, 32, log)
                              for each in sweep.split(",")], sweep_output)


if __name__ == "__main__":
    main()
