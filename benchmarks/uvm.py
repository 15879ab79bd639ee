"""Mixtures larger than the memory they may use, in managed memory (UVM) and with this engine's own strategies.

    python benchmarks/uvm.py --output results
    python benchmarks/uvm.py --models gpt-oss-120b --seconds 150 --output results

Each group of arms runs in a separate process with a deadline, because two models would not fit into memory and because
managed memory that fails may hang; what was measured by then is written. The managed arms share one model: uvm (pages
migrate when they are touched), uvm-advise (the driver is advised that they are read-mostly, and stored on the host) and
uvm-prefetch (pages migrate before they are touched). All managed memory always fits into the GPU's memory.

Weights are random, of the true shapes, and every token is routed to random experts, all equally likely, in all arms.
Decode is measured with one request, after random experts have filled the memory; prefill with 512 tokens, which use all
experts. Migrated bytes are those that this process counts, in whole units; where CUPTI counts them too, in a few more
tokens that are not timed, its numbers are reported as well, with page faults. Stall time covers all costs: the time of
a token minus the least time to compute it.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from big_models import half_budget
from gpu_workload import MODELS, RESULTS, Figure, opened, write
from mixture_workload import PREFILL, decode_rate, prefill_rate
from torch import Tensor
from uvm_counters import UvmCounters

from spillover import LLM
from spillover.engine.cuda.cuda_placement import CudaLayerExperts
from spillover.engine.cuda.paged_experts import PagedExperts
from spillover.engine.weights.managed import ManagedExperts, ManagedWeights
from spillover.errors import SpilloverError
from spillover.kernels.moe.moe import ResidentExperts
from spillover.memory.routing import uniform
from spillover.memory.transfer.host_pool import HostPool
from spillover.models.registry import architecture

UVM = ("uvm", "uvm-advise", "uvm-prefetch")
OWN = ("experts", "demand", "sequential")
BUDGETS: dict[str, Callable[[], int]] = {"gpt-oss-120b": lambda: 32 * 10**9,
                                         "qwen3-30b-a3b-fp8": lambda: half_budget("qwen3-30b-a3b-fp8"),
                                         "qwen3-30b-a3b": lambda: 24 * 10**9}
COUNTED_TOKENS = 4  # tokens decoded under CUPTI, which makes faults slower
FEWEST, MOST = 3, 48  # minimum and maximum number of tokens of a measurement
MARGIN = 4 << 30  # bytes of the GPU's memory that managed memory leaves free


class Clock:
    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()


@contextlib.contextmanager
def drawn_routing() -> Iterator[None]:
    """Route every mixture that the host launches to random experts, whatever the router's scores are."""
    with contextlib.ExitStack() as stack:
        for kind in (ManagedExperts, CudaLayerExperts, ResidentExperts):
            stack.enter_context(mock.patch.object(kind, "mixture", _drawn(kind.mixture)))
        yield


def _drawn(mixture: Any) -> Any:
    def drawn(experts: Any, x: Tensor, scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        paged = isinstance(getattr(experts, "experts", None), PagedExperts)  # these replay a trace, also in CUDA graphs
        result: Tensor = mixture(experts, x, scores if paged else torch.randn_like(scores), *args, **kwargs)
        return result

    return drawn


def replay(llm: LLM, model: str) -> None:
    """Replay uniform routing where the device looks up experts by itself."""
    experts = llm.engine.runner.weights.experts  # type: ignore[attr-defined]
    if isinstance(experts, PagedExperts):
        config = architecture(MODELS[model]).config(MODELS[model])
        trace = uniform(256, experts.table.layers, config.num_experts, config.experts_per_token)
        experts.replay(torch.tensor(trace, dtype=torch.int32, device="cuda"))
        llm.engine.runner.forget_graphs()  # type: ignore[attr-defined]


def fill(weights: ManagedWeights, rng: random.Random) -> None:
    """Fetch random experts until the device memory is nearly full, as after many tokens."""
    experts = [(index, unit) for index, part in enumerate(weights._parts) for unit in range(1, len(part.pages))]
    rng.shuffle(experts)
    for start in range(0, len(experts), 32):
        if weights.nbytes > 0.95 * weights._residency.capacity:
            break
        change = weights._residency.use(experts[start : start + 32])
        assert change is not None
        weights._move(change, fetch=True, ahead=False)
    torch.cuda.synchronize()


def measure(llm: LLM, arm: str, seconds: float, common: dict[str, Any], keep: Callable[[Figure], None]) -> None:
    """Measure one arm, in about `seconds`: decode, then prefill if there is time."""
    weights, rng, clock = llm.engine.runner.weights, random.Random(0), Clock(seconds)  # type: ignore[attr-defined]
    start, room = time.perf_counter(), llm.plan.placement.device_bytes if llm.plan.placement else 0
    if isinstance(weights, ManagedWeights):
        fill(weights, rng)
    rate = decode_rate(llm, rng, FEWEST, context=1)
    if clock.left > 0.8 * seconds:  # a fast arm: a few tokens have hardly changed what was loaded
        rate = decode_rate(llm, rng, MOST, context=1)
    warm = time.perf_counter() - start
    count = max(FEWEST, min(MOST, int(0.15 * seconds * rate)))
    before, free = weights.traffic(), torch.cuda.mem_get_info()[0]
    began = time.perf_counter()
    rates = [decode_rate(llm, rng, count, context=1)]
    while clock.left > 0.35 * seconds and len(rates) < 3:
        rates.append(decode_rate(llm, rng, count, context=1))
    spent, traffic = time.perf_counter() - began, weights.traffic().since(before)
    tokens = (count + 1) * len(rates)  # the first token of each is computed with the prompt, and moves bytes as well
    predicted = llm.plan.placement.predicted if llm.plan.placement else None
    details = {**common, "arm": arm, "phase": "decode", "tokens": count, "warm_seconds": warm,
               "hit_rate": traffic.hit_rate, "bytes_moved_per_token": traffic.bytes_moved / tokens,
               "bytes_back_per_token": traffic.bytes_back / tokens, "bytes_counted_by": "process",
               "moved_bytes_per_second": traffic.bytes_moved / spent, "device_bytes": weights.nbytes,
               "device_room": room, "card_free_bytes": free, "predicted_routing": "uniform"}
    if predicted is not None:  # cost of faults and copies, also where not counted: time beyond computing
        computing = sum(part for roof, part in predicted.decode_seconds if roof in ("memory", "compute"))
        details |= {"stall_seconds_per_token": 1 / statistics.median(rates) - computing, "stall_by": "time"}
    limit = predicted.decode_tokens_per_second if predicted else max(rates)
    keep(Figure(f"decode, {arm}", "tok/s", rates, limit, details=details))
    print(f"{arm}: decode {max(rates):.2f} tok/s ({', '.join(f'{each:.2f}' for each in rates)}), hits "
          f"{traffic.hit_rate if traffic.hit_rate is None else round(traffic.hit_rate, 3)}, "
          f"{traffic.bytes_moved / tokens / 1e6:.0f} MB in, {traffic.bytes_back / tokens / 1e6:.0f} MB back per token, "
          f"{traffic.bytes_moved / spent / 1e9:.1f} GB/s, warm {warm:.1f} s, card free {free / 1e9:.1f} GB", flush=True)
    if clock.left < 0.2 * seconds:
        print(f"{arm}: prefill skipped for lack of time", flush=True)
        return
    before, began = weights.traffic(), time.perf_counter()
    rates = [prefill_rate(llm, rng)]
    if clock.left > 1.5 * (time.perf_counter() - began):
        rates.append(prefill_rate(llm, rng))
    traffic = weights.traffic().since(before)
    details = {**common, "arm": arm, "phase": "prefill", "tokens": PREFILL, "hit_rate": traffic.hit_rate,
               "bytes_moved_per_step": traffic.bytes_moved / len(rates),
               "bytes_back_per_step": traffic.bytes_back / len(rates), "bytes_counted_by": "process",
               "predicted_routing": "uniform"}
    limit = predicted.prefill_tokens_per_second if predicted else max(rates)
    keep(Figure(f"prefill of {PREFILL}, {arm}", "tok/s", rates, limit, details=details))
    print(f"{arm}: prefill {max(rates):.0f} tok/s ({', '.join(f'{each:.0f}' for each in rates)}), "
          f"{traffic.bytes_moved / len(rates) / 1e9:.1f} GB in", flush=True)


def count_faults(llm: LLM, arms: list[str], clock: Clock, common: dict[str, Any],
                 keep: Callable[[Figure], None]) -> None:
    """Count page faults and bytes with CUPTI, in a few tokens of each arm that are not timed."""
    weights, rng = llm.engine.runner.weights, random.Random(1)  # type: ignore[attr-defined]
    try:
        counters = UvmCounters()
        for arm in arms:
            if clock.left < 8:
                print(f"{arm}: faults not counted for lack of time", flush=True)
                return
            weights.follow(arm)
            fill(weights, rng)
            decode_rate(llm, rng, 1, context=1)
            before = weights.traffic()
            with counters.counting() as found:
                decode_rate(llm, rng, COUNTED_TOKENS, context=1)
            moved = weights.traffic().since(before)
            tokens = COUNTED_TOKENS + 1
            print(f"{arm}: CUPTI counted {found}, this process {moved.bytes_moved} in, {moved.bytes_back} back",
                  flush=True)
            details = {**common, "arm": arm, "phase": "decode", "counted_by": "cupti", "tokens": tokens,
                       **{f"cupti_{name}": value for name, value in found.items()},
                       "process_bytes_in": moved.bytes_moved, "process_bytes_back": moved.bytes_back}
            faults = found["fault_groups"] / tokens
            keep(Figure(f"page faults, {arm}", "faults/token", [faults], max(1.0, faults), True, details))
    except (OSError, subprocess.SubprocessError) as error:
        print(f"faults are not counted here: {error}", flush=True)


def check_card(llm: LLM) -> None:
    """Exit before anything is computed if managed memory could ever exceed the GPU's memory."""
    plan, placement = llm.plan, llm.plan.placement
    assert placement is not None
    free, total = torch.cuda.mem_get_info()
    # Managed pages may count as used, so the comparison is with the GPU's whole memory, not with its free memory.
    if placement.managed_bytes + plan.device_bytes - placement.device_bytes + MARGIN > total:
        raise SystemExit(f"{placement.managed_bytes:,} bytes of managed memory are too much for a card of {total:,}")
    print(f"managed {placement.managed_bytes / 1e9:.1f} GB, room on the device {placement.device_bytes / 1e9:.1f} GB, "
          f"free {free / 1e9:.1f} of {total / 1e9:.1f} GB", flush=True)


def run_group(model: str, arms: list[str], seconds: float, count: bool, output: str) -> None:
    """Measure arms in this process; write the results after each row."""
    clock, budget, figures = Clock(seconds), BUDGETS[model](), list[Figure]()

    def keep(figure: Figure) -> None:
        figures.append(figure)
        with contextlib.redirect_stdout(io.StringIO()):
            write(f"uvm-{model}", figures, output)

    HostPool.keeps = True  # keeps pinned memory for the next arm
    flags: dict[str, Any] = {"gpu_memory": str(budget), "max_num_seqs": 8, "max_model_len": 4096,
                             "max_num_batched_tokens": 2048, "enable_prefix_caching": False}
    groups = [arms] if arms[0] in UVM else [[arm] for arm in arms]
    for index, group in enumerate(groups):
        if clock.left < 10:
            print(f"skipped for lack of time: {', '.join(group)}", flush=True)
            continue
        start = time.perf_counter()
        gc.collect()
        try:
            with opened(model, weights=group[0], **flags) as llm, drawn_routing():
                loaded = time.perf_counter() - start
                print(f"{group[0]}: loaded in {loaded:.1f} s", flush=True)
                weights = llm.engine.runner.weights  # type: ignore[attr-defined]
                if llm.plan.placement is None:
                    raise SystemExit(f"{model} fits into {budget:,} bytes: there is nothing to compare")
                common = {"model": model, "budget": budget, "routing": "uniform", "load_seconds": loaded,
                          "managed_bytes": llm.plan.placement.managed_bytes,
                          "enforce_eager": group[0] != "experts"}
                if isinstance(weights, ManagedWeights):
                    check_card(llm)
                replay(llm, model)
                start = time.perf_counter()
                decode_rate(llm, random.Random(0), 1, context=1)
                print(f"{group[0]}: first tokens, compiling, in {time.perf_counter() - start:.1f} s", flush=True)
                for place, arm in enumerate(group):
                    left = len(group) - place + sum(map(len, groups[index + 1 :])) + 0.5 * count
                    if clock.left < 8:
                        print(f"skipped for lack of time: {arm}", flush=True)
                        continue
                    if isinstance(weights, ManagedWeights):
                        weights.follow(arm)
                    measure(llm, arm, min(20.0, clock.left / left), common, keep)
                if count and isinstance(weights, ManagedWeights):
                    count_faults(llm, group, clock, common, keep)
                del weights
        except SpilloverError as error:
            print(f"{', '.join(group)}: {error}", flush=True)


def collected(paths: list[Path], output: str | None, model: str) -> None:
    """Combine what the groups of a model have written so far into one list, and write it."""
    if output is None:
        return
    found: list[Any] = []
    for path in paths:
        if path.exists():
            entries = json.loads(path.read_text())
            found += entries if isinstance(entries, list) else [entries]
    folder = RESULTS if output == "results" else Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"uvm-{model}.json").write_text(json.dumps(found, indent=2) + "\n")


@click.command()
@click.option("--models", default="qwen3-30b-a3b-fp8,gpt-oss-120b", show_default=True)
@click.option("--arms", default=",".join((*UVM, *OWN)), show_default=True)
@click.option("--seconds", default=240.0, show_default=True, help="For all models; what would start later is skipped.")
@click.option("--count/--no-count", default=True, show_default=True, help="Count page faults by CUPTI too.")
@click.option("--output", default=None, metavar="FOLDER", help="Write results; 'results' is benchmarks/results/.")
@click.option("--group-output", default=None, hidden=True, help="Measure in this process, and write to this file.")
def main(models: str, arms: str, seconds: float, count: bool, output: str | None, group_output: str | None) -> None:
    names, wanted = models.split(","), arms.split(",")
    for name in names:
        if name not in BUDGETS:
            raise SystemExit(f"--models takes {', '.join(BUDGETS)}; got {name}")
    for arm in wanted:
        if arm not in (*UVM, *OWN):
            raise SystemExit(f"--arms takes {', '.join((*UVM, *OWN))}; got {arm}")
    if group_output is not None:
        run_group(names[0], wanted, seconds, count, group_output)
        return
    clock = Clock(seconds)
    groups = [group for kind in (UVM, OWN) if (group := [arm for arm in kind if arm in wanted])]
    # A model of twice the bytes takes about twice as long to load and to move.
    shares = [(name, group, BUDGETS[name]()) for name in names for group in groups]
    with tempfile.TemporaryDirectory() as folder:
        for index, (name, group, share) in enumerate(shares):
            given = clock.left * share / sum(each for _, _, each in shares[index:]) - 5  # for the exit of the process
            paths = [Path(folder, f"{name}-{each[0]}.json") for each in groups]
            if given < 15:
                print(f"skipped for lack of time: {name}, {', '.join(group)}", flush=True)
                continue
            command = [sys.executable, __file__, "--models", name, "--arms", ",".join(group), "--seconds", str(given),
                       "--count" if count else "--no-count", "--group-output",
                       str(Path(folder, f"{name}-{group[0]}.json"))]
            print(f"== {name}: {', '.join(group)}, {given:.0f} s", flush=True)
            try:
                subprocess.run(command, timeout=given + 10, check=False)
            except subprocess.TimeoutExpired:
                print(f"{name}, {', '.join(group)}: stopped at its deadline", flush=True)
            collected(paths, output, name)


if __name__ == "__main__":
    main()
