"""Concurrent requests on a mixture larger than its memory budget: output tokens per second of all requests together.

    python benchmarks/over_budget.py --log gptoss.route.csv --requests 1,16,64 --output results
    python benchmarks/over_budget.py --log gptoss.route.csv --requests 1 --simulate 0.7,0.5,0.3

Weights are random, of the true shapes, and the routing of steps that page experts is replayed: "replayed" follows a log
of a real model's routing, each request from a different place in it, extended to the model's number of experts per
token by the log's own frequencies; "uniform" chooses every expert equally often, and is measured once. Rates are of
whole runs, including prefill. Each is compared with the limits of the bytes that its routing moved: over the link
alone, by the host alone, by both together, and by what the device needs to compute.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import click
import torch
from gpu_workload import MODELS, Figure, opened, roofline, run, write
from mixture_workload import decode_rate, random_tokens
from torch import Tensor

from spillover import LLM
from spillover.engine.cuda.cuda_runner import CudaRunner
from spillover.engine.cuda.paged_experts import PagedExperts
from spillover.engine.cuda.step_inputs import InputOffsets
from spillover.engine.step import StepItem
from spillover.engine.weights.traffic import WeightTraffic
from spillover.memory.routing import extended, read_log, uniform
from spillover.models.registry import architecture
from spillover.plan.rates import Rates
from spillover.plan.roofline import Roofline
from spillover.units import parse_bytes


class Replay:
    """Replayed routing that each request follows from a different place, one row per token."""

    def __init__(self, llm: LLM, model: str, log: str | None) -> None:
        runner, experts = llm.engine.runner, llm.engine.runner.weights.experts  # type: ignore[attr-defined]
        assert isinstance(runner, CudaRunner)
        assert isinstance(experts, PagedExperts), "nothing is over budget"
        config = architecture(MODELS[model]).config(MODELS[model])
        shape = experts.table.layers, config.num_experts, config.experts_per_token
        self._runner, self._experts = runner, experts
        self._traces = {"uniform": uniform(256, *shape)}
        if log is not None:
            self._traces["replayed"] = extended(read_log(log), shape[1], shape[2], shape[0])
        self._request_stride = 1  # rows of the trace between the places of two requests
        self._forward = runner._forward
        runner._forward = self._forward_at_offsets  # type: ignore[method-assign]

    @property
    def routings(self) -> list[str]:
        return sorted(self._traces)

    def steps(self, routing: str) -> int:
        return len(self._traces[routing])

    def follow(self, routing: str, requests: int) -> None:
        trace = self._traces[routing]
        self._request_stride = max(1, len(trace) // requests)
        self._experts.replay(torch.tensor(trace, dtype=torch.int32, device="cuda"))
        self._runner.forget_graphs()  # captured graphs contain the earlier routing

    def _forward_at_offsets(self, offsets: InputOffsets, item: StepItem | None = None) -> Tensor:
        inputs = self._runner._inputs
        slots = inputs.array(offsets, "slots")[inputs.array(offsets, "row_of").long()]
        self._experts.replay_at = (slots * self._request_stride + inputs.array(offsets, "positions")).int()
        return self._forward(offsets, item)


def limits(traffic: WeightTraffic, record: int, rates: Rates, roof: Roofline, requests: int, prompt: int,
           output: int) -> dict[str, float]:
    """Return the tokens per second of the whole run that each roof allows, and that all of them together allow."""
    assert rates.host_to_device is not None
    assert rates.kernel_read is not None
    assert rates.host_read is not None
    tokens = requests * output
    missed = (traffic.expert_misses + traffic.expert_hosted) * record
    streamed = traffic.bytes_moved - traffic.expert_misses * record
    streaming = streamed / rates.host_to_device
    shared = missed / (rates.kernel_read + rates.host_read)
    requested = (traffic.expert_hits + traffic.expert_misses + traffic.expert_hosted) * record
    prefill = roof.step([(prompt, 0)] * requests).seconds
    step, shape = roof.decode(requests, prompt + output // 2), roof.shape
    others = step.limit.bytes - shape.distinct_experts(requests) * shape.expert_bytes * shape.expert_layers
    decode = (output * others + requested) / rates.memory_read
    return {
        "link_limit": tokens / (streaming + missed / rates.host_to_device),
        "host_limit": tokens / (streaming + missed / rates.host_read),
        "link_and_host_limit": tokens / (streaming + shared),
        "device_limit": tokens / (prefill + decode),
        "limit": tokens / (max(streaming, prefill) + max(shared, decode)),
    }


def measure(llm: LLM, replay: Replay, routing: str, requests: int, prompt: int, output: int, repeats: int,
            rates: Rates, roof: Roofline, single: float, common: dict[str, Any]) -> Figure:
    weights, rng = llm.engine.runner.weights, random.Random(requests)  # type: ignore[attr-defined]
    replay.follow(routing, requests)
    found: list[float] = []
    prefills: list[float] = []
    for index in range(repeats + 1):  # the first compiles, captures, and fills the slots
        if index == 1:
            before, steps = weights.traffic(), llm.engine.num_steps
        start = time.perf_counter()
        outputs = run(llm, [random_tokens(rng, prompt) for _ in range(requests)], [output] * requests, 0.0)
        seconds = time.perf_counter() - start
        assert all(len(each.outputs[0].token_ids) == output for each in outputs)
        timings = [each.timings for each in outputs if each.timings is not None]
        if index:
            found.append(requests * output / seconds)
            prefills.append(max(each.first_token for each in timings) - min(each.arrived for each in timings))
    traffic = weights.traffic().since(before)
    share = WeightTraffic(**{name: value // repeats for name, value in vars(traffic).items()})
    roofs = limits(share, weights.experts.arena.record_bytes, rates, roof, requests, prompt, output)
    seconds = requests * output / statistics.median(found)
    details = {**common, **roofs, "routing": routing, "requests": requests, "routing_steps": replay.steps(routing),
               "times_single_uniform": statistics.median(found) / single, "single_uniform": single,
               "hit_rate": traffic.hit_rate, "steps": (llm.engine.num_steps - steps) / repeats,
               "first_tokens_seconds": statistics.median(prefills),
               "decode_tokens_per_second": requests * (output - 1) / (seconds - statistics.median(prefills)),
               "misses_per_output_token": (share.expert_misses + share.expert_hosted) / (requests * output),
               "hosted_per_output_token": share.expert_hosted / (requests * output),
               "bytes_moved_per_output_token": share.bytes_moved / (requests * output)}
    figure = Figure(f"{requests} requests, {routing}", "tok/s", found, roofs["limit"], details=details)
    print(f"{figure.metric}: {figure.value:.0f} tok/s, {details['times_single_uniform']:.1f}x one alone, "
          f"{figure.percent_of_limit:.0f}% of {roofs['limit']:.0f} (link {roofs['link_limit']:.0f}, host "
          f"{roofs['host_limit']:.0f}, both {roofs['link_and_host_limit']:.0f}, device {roofs['device_limit']:.0f}); "
          f"first tokens after {details['first_tokens_seconds']:.2f} s, then "
          f"{details['decode_tokens_per_second']:.0f} tok/s; hits {traffic.hit_rate:.1%}, "
          f"{details['misses_per_output_token']:.1f} misses/token, {details['hosted_per_output_token']:.1f} of them "
          f"hosted, {details['steps']:.0f} steps", flush=True)
    return figure


@click.command()
@click.option("--model", default="gpt-oss-120b", show_default=True)
@click.option("--gpu-memory", default="32GB", show_default=True)
@click.option("--requests", default="1,16,64", show_default=True)
@click.option("--input-len", default=256, show_default=True)
@click.option("--output-len", default=64, show_default=True)
@click.option("--log", default=None, help="A routing log to replay.")
@click.option("--routing", default="replayed,uniform", show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--seconds", default=95.0, show_default=True, help="Rows that would start later are skipped.")
@click.option("--fast", is_flag=True)
@click.option("--simulate", default=None, help="Speculate with this simulated acceptance by position; drafts are free.")
@click.option("--output", default=None, metavar="FILE", help="Write the result; 'results' is benchmarks/results/.")
def main(model: str, gpu_memory: str, requests: str, input_len: int, output_len: int, log: str | None, routing: str,
         repeats: int, seconds: float, fast: bool, simulate: str | None, output: str | None) -> None:
    end = time.monotonic() + seconds
    counts = [int(each) for each in requests.split(",")]
    roof = roofline(model)
    budget, before = parse_bytes(gpu_memory), torch.cuda.memory_allocated()
    figures: list[Figure] = []
    name = f"over-budget-{model}-{gpu_memory.lower()}{'' if simulate is None else '-speculation'}"
    with opened(model, gpu_memory=str(budget), weights="experts", max_num_seqs=max(counts), fast=fast,
                max_model_len=2 * (input_len + output_len), enable_prefix_caching=False,
                speculative_simulate=simulate) as llm:
        torch.cuda.reset_peak_memory_stats()  # excludes the buffers that planning used to measure the machine
        placement = llm.plan.placement
        assert placement is not None
        common = {"model": model, "budget": budget, "quota": placement.quota,
                  "stream_buffers": placement.stream_buffers, "paged_tokens": placement.paged_tokens,
                  "input_len": input_len, "output_len": output_len,
                  "max_num_batched_tokens": llm.plan.max_num_batched_tokens, "fast": fast,
                  "simulated_acceptance": simulate}
        print(", ".join(f"{key} {value}" for key, value in common.items()), flush=True)
        replay, rng = Replay(llm, model, log), random.Random(0)
        replay.follow("uniform", 1)
        decode_rate(llm, rng, 16)
        single = statistics.median(decode_rate(llm, rng, 64) for _ in range(3))
        print(f"one request, uniform: {single:.1f} tok/s", flush=True)
        for each in (each for each in routing.split(",") if each in replay.routings):
            for count in counts:
                if time.monotonic() > end:
                    print(f"skipped for lack of time: {count} requests, {each}", flush=True)
                    continue
                figures.append(measure(llm, replay, each, count, input_len, output_len,
                                       repeats if each == "replayed" else 1, roof.rates, roof, single, common))
                if output is not None:
                    write(name, figures, output)
        peak = torch.cuda.max_memory_allocated() - before
        print(f"peak {peak / 1e9:.2f} GB of {budget / 1e9:.2f}", flush=True)
        if peak > budget:
            raise SystemExit(f"peak device memory {peak:,} is above the budget {budget:,}")


if __name__ == "__main__":
    main()
