"""Kernels compile for a GPU that is not present, and stay within its registers and shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

KERNELS = Path(__file__).parents[2] / "support/kernels/compile_kernels.py"
SHARED = 227 << 10  # maximum bytes per thread block
FEW_BYTES = 256  # bytes spilled per thread: sums of chunks, accessed once per chunk


def test_kernels_of_one_order_compile_for_an_h200() -> None:
    done = subprocess.run([sys.executable, KERNELS], check=False, capture_output=True,
                          text=True, timeout=300, env={**os.environ, "TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert len(kernels) == 11
    assert {each["neighbours"] for each in kernels.values()} <= {0, 2}  # otherwise sums would have another order
    assert {name: each for name, each in kernels.items()
            if each["spilled"] > (FEW_BYTES if "chunks" in name else 0) or each["shared"] > SHARED} == {}
