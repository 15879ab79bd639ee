"""Compile Triton kernels for an H200 without having one, and print what ptxas reports on each as JSON.

    python tests/support/kernels/compile_kernels.py

It runs in its own process because Triton's interpreter cannot be turned off again.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from spillover.kernels.triton import ordered_linear
from spillover.kernels.triton.attention import ordered_decode, ordered_prefill
from spillover.kernels.triton.attention.ordered_splits import TILE_QUERIES
from spillover.kernels.triton.codes import CODES
from spillover.kernels.triton.launch import NO_FUSION

TARGET, PROCESSOR = GPUTarget("cuda", 90, 32), "sm_90a"
ATTENTION = {
    "q_ptr": "*bf16", "kv_ptr": "*bf16", "out_ptr": "*bf16", "sinks_ptr": "*bf16", "sums_ptr": "*fp32",
    "stats_ptr": "*fp32", "scale": "fp32", **dict.fromkeys(
        ("finished_ptr", "items_ptr", "num_items_ptr", "table_ptr", "tiles_ptr", "query_start_ptr", "seq_lens_ptr",
         "slots_ptr"), "*i32"),
}
LINEAR = {"x_ptr": "*bf16", "w_ptr": "*bf16", "bias_ptr": "*bf16", "out_ptr": "*bf16", "sums_ptr": "*fp32",
          "arrivals_ptr": "*i32"}
HEADS = {"GROUP": 4, "DIM": 128, "PADDED": 128, "BLOCK": 16, "TILE": 64, "WINDOW_PIECE": 0, "SINKS": False}


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int,
             early: bool = False, registers: int | None = None) -> dict[str, int]:
    """Return a kernel's registers, bytes of spilled registers and of shared memory, and the maximum number of
    neighbours of the inner dimension that a thread supplies to a product, which determines their order. Arguments not
    in `types` are int32; all that are not constants are multiples of 16."""
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    plain = [index for index, name in enumerate(kernel.arg_names)
             if name not in constants and name not in ("rows", "scale", "eps") and "desc" not in types.get(name, "")]
    source = ASTSource(kernel, signature, constants, {(index,): [["tt.divisibility", 16]] for index in plain})
    made = triton.compile(source, TARGET, {"num_warps": warps, "num_stages": stages, "launch_pdl": early,
                                           "maxnreg": registers, **NO_FUSION})
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        told = subprocess.run([ptxas, "-v", f"--gpu-name={PROCESSOR}", file.name, "-o", "/dev/null"], check=True,
                              capture_output=True, text=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", told), re.search(r"(\d+) bytes spill stores", told)
    assert registers, told
    assert spilled, told
    return {"registers": int(registers[1]), "spilled": int(spilled[1]), "shared": made.metadata.shared,
            "neighbours": max(map(int, re.findall(r"dot_op<\{[^}]*kWidth = (\d+)", made.asm["ttgir"])), default=0)}


def decode(kv_dtype: str, queries: int = 1) -> dict[str, int]:
    types = ATTENTION if kv_dtype == "auto" else {**ATTENTION, "kv_ptr": "*u8"}
    constants = {**HEADS, "KV_HEADS": 8, "ROWS": max(16, 4 * queries), "FEW": 4, "QUERIES": queries,
                 "CODES": CODES[kv_dtype], "EARLY": True}
    stages = 2 if queries > 1 else ordered_decode.stages(8, kv_dtype)
    return compiled(ordered_decode._ordered_decode, types, constants, ordered_decode.WARPS, stages, True,
                    ordered_decode.REGISTERS[stages] if queries == 1 else None)


def prefill() -> dict[str, int]:
    queries, warps, stages = ordered_prefill.SMALL
    constants = {**HEADS, "TILE_QUERIES": TILE_QUERIES, "QUERIES": queries, "WINDOW": 0, "SLOTS": True, "CODES": 0}
    return compiled(ordered_prefill._ordered_prefill, ATTENTION, constants, warps, stages)


def few_rows(chunks: int, gated: bool) -> dict[str, int]:
    height, width, stages = (16, 64, 4) if chunks == 1 else (8, 16, 3)
    constants = {"CHUNKS": chunks, "ROWS": height, "CHANNELS": width, "STEP": 128, "EVEN": True, "BIAS": False,
                 "GATED": gated, "EARLY": True}
    return compiled(ordered_linear._few_rows, LINEAR, constants, 4, stages, True)


def few_rows_ahead(inner: int, width: int, norm: bool, gated: bool) -> dict[str, int]:
    types = {**LINEAR, **dict.fromkeys(("residual_ptr", "norm_ptr", "total_ptr"), "*bf16"), "eps": "fp32"}
    constants = {"CHUNKS": 4, "CHUNK": inner // 4, "STEP": 256, "ROWS": 8, "REAL": 1, "CHANNELS": width, "NORM": norm,
                 "BIAS": False, "GATED": gated, "EARLY": True}
    return compiled(ordered_linear._few_rows_ahead, types, constants, ordered_linear.AHEAD_WARPS, 3, True)


def described(tile: ordered_linear.Tile, chunks: int) -> dict[str, int]:
    constants = {"CHUNKS": chunks, "SPREAD": tile.spread, "ROWS": tile.rows, "CHANNELS": tile.channels,
                 "STEP": tile.step, "BAND": 8, "FLIP": tile.flip, "BIAS": False, "EARLY": True}
    types = {**LINEAR, "x_desc": f"tensordesc<bf16[{tile.rows},{tile.step}]>",
             "w_desc": f"tensordesc<bf16[{tile.channels},{tile.step}]>"}
    return compiled(ordered_linear._described, types, constants, tile.warps, tile.stages, True)


if __name__ == "__main__":
    print(json.dumps({
        "decode": decode("auto"), "decode fp8": decode("fp8"), "16 new tokens": decode("auto", 16),
        "prefill": prefill(), "1 row, 4 chunks": few_rows(4, False), "1 row, gated": few_rows(1, True),
        "1 row, norm and gate": few_rows_ahead(1024, 16, True, True),
        "1 row, ahead": few_rows_ahead(3072, 8, False, False),
        "64 rows, spread": described(ordered_linear.DEEP_SPREAD, 4),
        "512 rows": described(ordered_linear.SQUARE, 1), "many rows, 4 chunks": described(ordered_linear.LARGE, 4),
    }))
