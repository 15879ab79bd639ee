"""Products with quantised weights compared with bfloat16 ones: the four of a Llama-3.1-8B layer, and of its 32 layers.

    python benchmarks/coded_products.py --output coded_products.json
    python benchmarks/coded_products.py --rows 64,128 --forms int4

From 17 rows on, every cut is timed (above 256 rows only those with large tiles and without a cluster), and all must
give the same bits; the cut that the engine would choose is marked with a star.
Each form at some rows is timed in a separate process with a deadline: a kernel that hangs costs no more than that.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
from gpu_workload import origin
from torch import Tensor

from spillover.kernels.cuda import coded_linear as cuda
from spillover.kernels.cuda import ordered_gemm
from spillover.kernels.cuda.coded_linear import TileForm, coded_linear
from spillover.kernels.triton.ordered_linear import ordered_linear

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}  # channels, inputs
FORMS = {"int4": TileForm(4, 1, "BFLOAT"), "int8": TileForm(8, 1, "BFLOAT"), "Q4_K": TileForm(4, 4, "SUPER")}
ROWS = (1, 8, 16, 24, 32, 64, 96, 128, 192, 256, 1024, 8192)
GROUPS = tuple(rows for rows in ROWS if rows <= 256), (1024, 8192)  # numbers of rows that one process times
LAYERS = 32
COLD = 160 << 20  # bytes of distinct weights that are multiplied in turn: more than any cache holds
MOST_COPIES = 32


def milliseconds(run: Callable[[int], object], copies: int, rows: int) -> float:
    """Return the median time of one call, from replays of a graph that calls `run` with each copy in turn."""
    copies = copies if rows <= 256 else min(copies, 2)
    run(0)
    torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run(0)
        with torch.cuda.graph(graph, stream=stream):
            for copy in range(copies):
                run(copy)
    times = []
    for _ in range(5 if rows <= 256 else 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / copies)
    return sorted(times)[len(times) // 2]


def copies_of(nbytes: int) -> int:
    return max(2, min(MOST_COPIES, -(-COLD // nbytes)))


def random_tiles(form: TileForm, channels: int, inner: int, copies: int) -> Tensor:
    """Return tiles of random codes, with scales that are small constants."""
    shape = copies, *form.tiles_shape(channels, inner)
    tiles = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    codes = 256 * form.bits
    if form.scales == "SUPER":
        tiles[..., codes : codes + 64] = torch.full((32,), 1e-3, dtype=torch.float16).view(torch.uint8).cuda()
    else:
        scales = torch.full((16 * form.groups,), 0.01, dtype=torch.bfloat16).view(torch.uint8).cuda()
        tiles[..., codes : codes + 32 * form.groups] = scales
    return tiles


def time_codes(form: TileForm, rows: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Time the products of a form; from 17 rows on with every cut."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for shape, (channels, inner) in SHAPES.items():
        copies = copies_of(channels * inner * form.bits // 8)
        tiles = random_tiles(form, channels, inner, copies)
        halves = shape == "gate_up"
        for count in rows:
            x = torch.randn(count, inner, device="cuda").bfloat16()
            used = form.for_inputs(x.dtype)
            chosen = cuda.choose_cut(count, channels // cuda.STRIP, inner // cuda.STEP, used, processors)
            cuts = [chosen] if count < 17 else [
                cut for cut in cuda.many_cuts(count, inner // cuda.STEP, used)
                if count <= 256 or (cut.rows >= 64 and cut.spread == 1) or cut == chosen]
            few = coded_linear(x[:8], tiles[0], form, halves=halves)  # computed by the kernel for few rows
            expected = coded_linear(x, tiles[0], form, halves=halves, cut=cuts[0])
            for cut in cuts:
                def run(copy: int, x: Tensor = x, tiles: Tensor = tiles, cut: Any = cut,
                        halves: bool = halves) -> Tensor:
                    return coded_linear(x, tiles[copy], form, halves=halves, early=True, cut=cut)

                name = f"{cut.kernel}{f'_{cut.spread}' if isinstance(cut, cuda.ManyCut) else ''}"
                out = run(0)
                yield {"shape": shape, "rows": count, "cut": name, "chosen": cut == chosen,
                       "same_bits": torch.equal(out, expected) and torch.equal(out[:8], few),
                       "ms": milliseconds(run, copies, count)}


def time_bf16(rows: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Time the bfloat16 products, which have a fixed order of summation."""
    for shape, (channels, inner) in SHAPES.items():
        copies = copies_of(channels * inner * 2)
        weights = [torch.randn(channels, inner, device="cuda").bfloat16() for _ in range(copies)]
        most = min(max(rows), 256)
        ordered_gemm.prepare([(channels, inner, False, False)], torch.bfloat16, torch.device("cuda"), most)
        for count in rows:
            x = torch.randn(count, inner, device="cuda").bfloat16()

            def run(copy: int, x: Tensor = x, weights: list[Tensor] = weights) -> Tensor:
                return ordered_linear(x, weights[copy])

            yield {"shape": shape, "rows": count, "cut": "", "chosen": True, "same_bits": True,
                   "ms": milliseconds(run, copies, count)}


def measure(form: str, rows: tuple[int, ...], deadline: float) -> dict[str, Any]:
    """Time one form at some rows in a separate process."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        command = [sys.executable, __file__, "--forms", form, "--rows", ",".join(map(str, rows)), "--here", file.name]
        began = time.monotonic()
        try:
            done = subprocess.run(command, timeout=deadline, capture_output=True, text=True, check=False)
            problem = done.stderr.strip()[-600:] if done.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"not done after {deadline:.0f} s"
        # The results until then; the last line may be incomplete.
        lines = Path(file.name).read_text().split("\n")[:-1]
        results = [json.loads(line) for line in lines]
    return {"form": form, "rows": rows, "problem": problem, "seconds": time.monotonic() - began, "results": results}


def show(group: dict[str, Any]) -> None:
    print(f"{group['form']}, rows {group['rows']}: {group['seconds']:.0f} s {group['problem']}", flush=True)
    for rows in group["rows"]:
        layer = 0.0
        for shape in SHAPES:
            timed = sorted((each for each in group["results"] if (each["rows"], each["shape"]) == (rows, shape)),
                           key=lambda each: each["ms"])
            layer += sum(each["ms"] for each in timed if each["chosen"])
            timings = ", ".join(f"{each['cut']}{'*' if each['chosen'] else ''} {each['ms'] * 1e3:.1f}"
                                f"{'' if each['same_bits'] else ' OTHER BITS'}" for each in timed)
            print(f"  {rows:5d} {shape:8s} us: {timings}")
        print(f"  {rows:5d} {LAYERS} layers as chosen: {layer * LAYERS:.2f} ms", flush=True)


@click.command()
@click.option("--forms", default=",".join((*FORMS, "bf16")), help="comma-separated: any of int4, int8, Q4_K, bf16")
@click.option("--rows", default=",".join(map(str, ROWS)))
@click.option("--deadline", default=40.0, help="seconds that a process may take")
@click.option("--output", type=click.Path(path_type=Path))
@click.option("--here", type=click.Path(path_type=Path), hidden=True)
def main(forms: str, rows: str, deadline: float, output: Path | None, here: Path | None) -> None:
    wanted = tuple(int(each) for each in rows.split(","))
    if here is not None:
        with here.open("w") as file:
            for result in time_bf16(wanted) if forms == "bf16" else time_codes(FORMS[forms], wanted):
                print(json.dumps(result), file=file, flush=True)
        return
    if other := [count for count in wanted if count not in ROWS]:
        raise click.UsageError(f"rows {other}: only {ROWS}")
    groups = []
    for form in forms.split(","):
        for group in GROUPS:
            if part := tuple(count for count in wanted if count in group):
                groups.append(measure(form, part, deadline))
                show(groups[-1])
    if output:
        output.write_text(json.dumps({**origin(), "groups": groups}, indent=1) + "\n")


if __name__ == "__main__":
    main()
