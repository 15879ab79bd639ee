"""Matrix products of Llama-3.1-8B's shapes on a GPU: bfloat16 with one order of summation, FP8 by rows and by blocks.

    python benchmarks/gpu_linear.py --output linear.json          # the cuts that the engine chooses
    python benchmarks/gpu_linear.py --cuts                        # also every cut of FP8 products

A graph contains the products of 32 layers with different weights, so that no cache holds them. Each form runs in a
separate process with a deadline; the bits of a row are compared between all numbers of rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_kernels import seconds
from gpu_workload import origin
from torch import Tensor

from spillover.kernels.cuda import fp8_linear as cuda
from spillover.kernels.cuda.driver.compiled import compile_ahead
from spillover.kernels.cuda.driver.tensor_map import processors
from spillover.kernels.cuda.fp8_linear import Cut, FewCut, Shape, fp8_linear
from spillover.kernels.fields import Field
from spillover.kernels.formats.fp8 import dummy_fp8
from spillover.kernels.triton.launch import pdl_options
from spillover.kernels.triton.ordered_linear import ordered_linear

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = (1, 2, 8, 16, 32, 64, 128, 256, 1024, 8192)
FORMS = ("bf16", "fp8 rows", "fp8 blocks")
LAYERS = 32
DEADLINE = 300  # seconds that one form may take
DEVICE = torch.device("cuda")

Product = Callable[[Tensor], Tensor]


def weights(form: str, channels: int, inner: int, random: torch.Generator) -> tuple[Tensor, ...]:
    if form == "bf16":
        made = torch.empty(channels, inner, dtype=torch.bfloat16, device=DEVICE)
        return (made.normal_(std=0.02, generator=random),)
    shape = (channels // 128, inner // 128) if form == "fp8 blocks" else (channels,)
    return (dummy_fp8(Field("values", "float8_e4m3fn", (channels, inner)), DEVICE, random),
            dummy_fp8(Field("scales", "float32", shape), DEVICE, random))


def product(form: str, tensors: tuple[Tensor, ...], cut: FewCut | Cut | None = None) -> Product:
    begins_early = pdl_options(DEVICE)["EARLY"]
    if form == "bf16":
        return lambda x: ordered_linear(x, tensors[0])
    return lambda x: fp8_linear(x, *tensors, early=begins_early, cut=cut)


def all_layers(products: list[Product], x: Tensor) -> None:
    for each in products:
        each(x)


def cuts(rows: int, shape: Shape) -> list[FewCut | Cut]:
    """Return every cut of a product, compiled."""
    found: list[FewCut | Cut] = []
    if rows <= cuda.FEW_ROWS:
        found += cuda.few_cuts(rows, shape, processors(DEVICE))
    if rows >= 32:
        found += cuda.cuts(rows, shape, processors(DEVICE))
    for cut in found:
        compile_ahead(cut.source, {cut.options(shape.config, torch.bfloat16)}, DEVICE)
    return found


def measure(form: str, every_cut: bool) -> list[dict[str, Any]]:
    """Time all shapes at all numbers of rows, and check that bits are the same."""
    found: list[dict[str, Any]] = []
    random = torch.Generator(DEVICE).manual_seed(0)
    for name, (channels, inner) in SHAPES.items():
        layers = [weights(form, channels, inner, random) for _ in range(LAYERS)]
        x = torch.randn(ROWS[-1], inner, generator=random, device=DEVICE).to(torch.bfloat16)
        whole = product(form, layers[0])(x)
        shape = Shape(channels, inner, form == "fp8 blocks")
        for rows in ROWS:
            tried: list[FewCut | Cut | None] = [None]
            if every_cut and form != "bf16":
                tried += cuts(rows, shape)
            for cut in tried:
                same = torch.equal(product(form, layers[0], cut)(x[:rows]), whole[:rows])
                count = LAYERS if rows <= 1024 else 4
                products = [product(form, layer, cut) for layer in layers[:count]]
                elapsed = seconds(partial(all_layers, products, x[:rows]), calls=1)
                used = cut or (cuda.choose_cut(rows, shape, processors(DEVICE)) if form != "bf16" else None)
                row = {"form": form, "shape": name, "rows": rows, "chosen": cut is None, "cut": used and used._asdict(),
                       "same_bits": same, "ms_of_32_layers": elapsed * 1e3 * LAYERS / count,
                       "tb_per_second": sum(tensor.nbytes for tensor in layers[0]) * count / elapsed / 1e12,
                       "tflop_per_second": 2 * rows * channels * inner * count / elapsed / 1e12}
                found.append(row)
                print(f"{form:10s} {name:8s} {rows:5d} rows {row['ms_of_32_layers']:9.3f} ms "
                      f"{row['tb_per_second']:6.2f} TB/s "
                      f"{row['tflop_per_second']:7.1f} TFLOP/s {'' if same else 'OTHER BITS '}{tuple(used or ())}",
                      flush=True)
        del layers
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--cuts", action="store_true", help="time every cut of FP8 products")
    parser.add_argument("--form", choices=FORMS, help="time only this form, in this process")
    parser.add_argument("--deadline", type=int, default=DEADLINE)
    given = parser.parse_args()
    if given.form:
        found = measure(given.form, given.cuts)
        if given.output:
            given.output.write_text(json.dumps(found, indent=1))
        return
    rows: list[dict[str, Any]] = []
    for form in FORMS:
        part = Path(f"{given.output or 'gpu_linear'}.part")
        command = [sys.executable, __file__, "--form", form, "--output", str(part), *(["--cuts"] if given.cuts else [])]
        try:
            done = subprocess.run(command, timeout=given.deadline, check=False).returncode
        except subprocess.TimeoutExpired:
            done = None
        if done == 0:
            rows += json.loads(part.read_text())
        else:
            rows.append({"form": form, "failed": "deadline" if done is None else f"status {done}"})
        part.unlink(missing_ok=True)
        if given.output:
            given.output.write_text(json.dumps({**origin(), "results": rows}, indent=1))
    for form in FORMS:
        sums = {count: sum(row["ms_of_32_layers"] for row in rows if row["form"] == form and row.get("rows") == count
                           and row["chosen"]) for count in ROWS}
        print(form, {count: round(ms, 2) for count, ms in sums.items()}, "ms of 32 layers by rows")


if __name__ == "__main__":
    main()
