"""KV tiers on a GPU, models of the true shapes with random weights: how fast prefixes are restored, and the time saved.

    python benchmarks/kv_tiers_gpu.py --folder results

For each model: the rate at which prefixes of 8k to 64k tokens are restored from host memory, compared with one large
copy of pinned memory; TTFT of prefixes of 1k to 64k tokens if nothing is cached, and from the device, host memory and
disk, with the length from which each is faster. Results are written after each measurement, to kv-tiers-MODEL.json in
the folder. `--tiny` uses a model of a few kilobytes, on the CPU if there is no GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import random
import statistics
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from gpu_workload import MODELS, RESULTS, Figure, opened, roofline, write

from spillover import LLM, SamplingParams
from spillover.engine.output.outputs import RequestOutput
from spillover.memory.spill import restore_plan
from spillover.memory.spill.tiered_connector import TieredConnector
from spillover.plan.measure import measure_disk, measure_link, measure_rates
from spillover.plan.rates import LinkRates
from spillover.plan.roofline import Roofline

TINY = {"architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 4096, "torch_dtype": "float32",
        "tie_word_embeddings": False}
TAIL = 8  # tokens after the prefix, which are always computed
LARGE_COPY = 1 << 30
WAYS = ("cold", "device", "host", "auto", "split", "disk")
NAMES = {"cold": "computed", "device": "from the device", "host": "from host memory",
         "auto": "from host memory, restore auto", "split": "from host memory, the front computed meanwhile",
         "disk": "from disk"}


@dataclass(frozen=True)
class Sizes:
    """The sizes that a run measures."""

    lengths: tuple[int, ...]
    restore_lengths: tuple[int, ...]  # prefixes whose restore is compared with the link
    chunk: int
    large_copy: int = LARGE_COPY
    disk_once_from: int = 32768  # from this length on, disk is measured in the first repeat only

    @property
    def longest(self) -> int:
        return self.lengths[-1] + 64


FULL = Sizes(tuple(1024 << power for power in range(7)), (8192, 16384, 32768, 65536), 8192)
SMALL = Sizes((64, 128, 256, 512), (256, 512), 128, 8 << 20, 512)


@dataclass(frozen=True)
class Limits:
    """The limits of this machine, by rates measured in this run."""

    roof: Roofline
    large_copy: float  # bytes per second of one large copy from pinned memory
    link: LinkRates
    disk_read: float
    token_bytes: float  # KV bytes of a token

    def seconds(self, way: str, prefix: int) -> float:
        """Return the minimum TTFT of a prefix whose KV is obtained in this way."""
        step = self.roof.prefill(TAIL, prefix).seconds
        computing = self.roof.prefill(prefix + TAIL).seconds
        loading = prefix * self.token_bytes / self.large_copy
        return {"cold": computing, "device": step, "host": loading + step,
                "auto": min(computing, loading + step, loading * computing / (loading + computing) + step),
                "split": loading * computing / (loading + computing) + step,
                "disk": prefix * self.token_bytes / self.disk_read + step}[way]


@dataclass
class Report:
    """The figures measured so far; the file always holds all of them."""

    name: str
    path: Path
    figures: list[Figure] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def put(self, figures: Sequence[Figure]) -> None:
        """Add figures, replacing earlier ones of the same metrics, and write the file."""
        new = {figure.metric: figure for figure in figures}
        self.figures = [new.pop(figure.metric, figure) for figure in self.figures] + list(new.values())
        with contextlib.redirect_stdout(io.StringIO()):
            write(self.name, self.figures, str(self.path), **self.details)

    def show(self) -> None:
        if self.figures:
            write(self.name, self.figures, str(self.path), **self.details)


@dataclass(frozen=True)
class Visit:
    """The result of requesting one prompt once."""

    first_token: float
    restore: float  # seconds in which loads were in flight
    host: int  # tokens restored from host memory; the next: from disk
    disk: int


@click.command()
@click.option("--model", "models", default="qwen3-8b,llama-3.1-8b", show_default=True, metavar="NAME,...")
@click.option("--lengths", default=None, metavar="N,...", help="Prefix lengths, ascending.  [default: 1024 to 65536]")
@click.option("--folder", default="results", show_default=True, help="Results folder; 'results' is benchmarks/results.")
@click.option("--chunk", default=None, type=int, help="--max-num-batched-tokens of prefill. [default: 8192]")
@click.option("--disk", default=None, help="Folder on the disk to measure; a temporary folder in it is used.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--seconds", default=100.0, show_default=True, help="Time for one model; the rest is skipped.")
@click.option("--tiny", is_flag=True, help="Use a tiny model and short prefixes, to test the script itself.")
@click.option("--enforce-eager", is_flag=True, help="Run without CUDA graphs.")
def main(models: str, lengths: str | None, folder: str, chunk: int | None, disk: str | None, repeats: int,
         seconds: float, tiny: bool, enforce_eager: bool) -> None:
    sizes = SMALL if tiny else FULL
    sizes = dataclasses.replace(sizes, chunk=chunk or sizes.chunk)
    if lengths is not None:
        sizes = dataclasses.replace(sizes, lengths=tuple(int(length) for length in lengths.split(",")))
    for name in ["tiny"] if tiny else models.split(","):
        shape = dict(TINY) if tiny else {**MODELS[name], "max_position_embeddings": max(
            MODELS[name]["max_position_embeddings"], sizes.longest)}
        MODELS[f"{name}, long"] = shape
        path = (RESULTS if folder == "results" else Path(folder)) / f"kv-tiers-{name}.json"
        report = Report(f"kv-tiers-{name}", path)
        began = time.monotonic()
        try:
            measure_prefixes(f"{name}, long", sizes, repeats, began + seconds, report, disk, enforce_eager)
        except Exception:  # the other models can still be measured
            traceback.print_exc()
            print(f"{name} was not measured", flush=True)
        _free_device_memory()
        report.show()


def measure_prefixes(name: str, sizes: Sizes, repeats: int, deadline: float, report: Report, disk: str | None,
                     enforce_eager: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    large, rates = _large_copy(device, sizes.large_copy), measure_rates(device, 1.0)
    with tempfile.TemporaryDirectory(prefix="spill-kv-", dir=disk) as folder:
        disk_rates = measure_disk(Path(folder), seconds=1.0)
        blocks = -(-sizes.longest // 16) + 64
        token_bytes = _token_bytes(MODELS[name])
        capacity = int(1.2 * sizes.longest * token_bytes) + (256 << 20)
        with opened(name, dtype=MODELS[name]["torch_dtype"], max_model_len=sizes.longest, max_num_seqs=4,
                    max_num_batched_tokens=sizes.chunk, num_gpu_blocks_override=blocks, host_memory=str(capacity),
                    disk=(f"{folder}:{2 * capacity}",), spill="eager", enforce_eager=enforce_eager) as llm:
            link = measure_link(device, llm.plan.slot_bytes, 0.3)
            limits = Limits(roofline(name, rates), large, link, disk_rates.read, token_bytes)
            report.details.update(large_copy_gb_s=large / 1e9, link_gb_s=link.to_device / 1e9,
                                  disk_gb_s=disk_rates.read / 1e9, chunk=sizes.chunk)
            print(f"{name}: one copy {large / 1e9:.1f} GB/s, block copies {link.to_device / 1e9:.1f} GB/s in and "
                  f"{link.to_host / 1e9:.1f} out, disk {disk_rates.read / 1e9:.1f} GB/s read", flush=True)
            _time_request(llm, _prompt(min(2 * sizes.chunk, sizes.lengths[-1]), 0))  # warm-up
            _reset_caches(llm, external=True)
            visits: dict[tuple[int, str], list[Visit]] = {}
            for repeat in range(repeats):
                for length in sizes.lengths:
                    began = time.monotonic()
                    _measure_prefix(llm, length, 1 + repeat, visits, repeat == 0 or length < sizes.disk_once_from)
                    report.put(_prefix_figures(visits, sizes, limits))
                    # The next prefix is twice as long: computing may take four times as long, copies twice.
                    if time.monotonic() + 2.5 * (time.monotonic() - began) > deadline and length != sizes.lengths[-1]:
                        print(f"{name}: no time for prefixes above {length} in repeat {repeat + 1}", flush=True)
                        break
                print(_prefix_table(visits, sizes), flush=True)


def _measure_prefix(llm: LLM, length: int, seed: int, visits: dict[tuple[int, str], list[Visit]], disk: bool) -> None:
    """Request the same prompt in all ways; then discard all that was cached for it."""
    prompt = _prompt(length, seed)

    def ask(way: str, restore: str = "always", share: float = restore_plan.SHARE) -> None:
        connector = _connector(llm)
        connector.restore = restore
        usual = restore_plan.SHARE, restore_plan.WORTH
        restore_plan.SHARE = share
        step = connector.cost.step_seconds
        if way == "split":
            connector.cost.step_seconds, restore_plan.WORTH = 0.0, 1.0  # splits whatever it costs
        try:
            visits.setdefault((length, way), []).append(_time_request(llm, prompt))
        finally:
            restore_plan.SHARE, restore_plan.WORTH = usual
            connector.cost.step_seconds = min(step, connector.cost.step_seconds) if way != "split" else step

    ask("cold")
    ask("device")
    for way, restore, share in (("host", "always", 0.0), ("auto", "auto", restore_plan.SHARE), ("split", "auto", 0.0)):
        _reset_caches(llm, stored=False)
        ask(way, restore, share)
    if disk:
        _reset_caches(llm)
        ask("disk")
    _reset_caches(llm, external=True)


def _prefix_figures(visits: dict[tuple[int, str], list[Visit]], sizes: Sizes, limits: Limits) -> list[Figure]:
    figures = []
    for length in sizes.restore_lengths:
        found = [visit for visit in visits.get((length, "host"), ()) if visit.host]
        if found:
            rates = [visit.host * limits.token_bytes / visit.restore / 1e9 for visit in found]
            figures.append(Figure(f"host restore of {length} tokens", "GB/s", rates, limits.large_copy / 1e9, details={
                "tokens_from_host": [visit.host for visit in found],
                "percent_of_block_copies": 100 * statistics.median(rates) * 1e9 / limits.link.to_device}))
    for (length, way), found in sorted(visits.items(), key=lambda item: (item[0][0], WAYS.index(item[0][1]))):
        times = [1e3 * visit.first_token for visit in found]
        figures.append(Figure(f"TTFT of {length} tokens, {NAMES[way]}", "ms", times,
                              1e3 * limits.seconds(way, length), lower_is_better=True,
                              details={"tokens_from_host": found[-1].host, "tokens_from_disk": found[-1].disk}))
    for way in ("host", "disk"):
        shortest = break_even(visits, way)
        if shortest is not None:
            figures.append(Figure(f"break-even {NAMES[way]}: prefixes that win, from", "tokens", [float(shortest)],
                                  float(sizes.lengths[0]), lower_is_better=True))
    return figures


def break_even(visits: dict[tuple[int, str], list[Visit]], way: str) -> int | None:
    """Return the shortest prefix from which on this way is faster than computing; None if the longest is not."""
    found = None
    for length in sorted({length for length, each in visits if each == way}, reverse=True):
        if _median(visits[length, way]) >= _median(visits[length, "cold"]):
            break
        found = length
    return found


def _prefix_table(visits: dict[tuple[int, str], list[Visit]], sizes: Sizes) -> str:
    lines = ["prefix  " + "".join(f"{way:>12}" for way in WAYS) + "   TTFT in ms, medians"]
    for length in sizes.lengths:
        if (length, "cold") not in visits:
            continue
        medians = {way: _median(visits[length, way]) for way in WAYS if (length, way) in visits}
        wins = [way for way in ("host", "disk") if break_even(visits, way) == length]
        cells = "".join(f"{1e3 * medians[way]:12,.1f}" if way in medians else f"{'-':>12}" for way in WAYS)
        lines.append(f"{length:>6}  {cells}" + (f"   <- {', '.join(wins)} wins from here" if wins else ""))
    return "\n".join(lines)


def _time_request(llm: LLM, prompt: list[int]) -> Visit:
    """Request one token; return when all copies that the request caused have completed."""
    output: RequestOutput = llm.generate({"prompt_token_ids": prompt}, SamplingParams(
        temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False), use_tqdm=False)[0]
    assert output.timings is not None
    timings = output.timings
    return Visit(timings.first_token - timings.arrived, timings.restore, output.sources.host, output.sources.disk)


def _reset_caches(llm: LLM, stored: bool = True, external: bool = False) -> None:
    if stored:
        llm.engine.scheduler.reset_prefix_cache(external)
    else:
        llm.engine.scheduler.kv.reset_prefix_cache()


def _connector(llm: LLM) -> TieredConnector:
    connector = llm.engine.scheduler.connector
    assert isinstance(connector, TieredConnector)
    return connector


def _prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(1, 500) for _ in range(length + TAIL)]


def _token_bytes(config: dict[str, Any]) -> float:
    itemsize = 4 if config["torch_dtype"] == "float32" else 2
    return float(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * itemsize)


def _large_copy(device: str, size: int) -> float:
    """Return the bytes per second of one copy from pinned memory to the device; on the CPU within memory."""
    source = torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda").fill_(1)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(6):
        _synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        _synchronize()
        seconds.append(time.perf_counter() - start)
    return size / statistics.median(seconds[1:])


def _median(visits: Sequence[Visit]) -> float:
    return statistics.median(visit.first_token for visit in visits)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _free_device_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
