"""The library is built once and kept; where it cannot be, torch's kernels take over."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spillover.kernels import native

PROGRAM = """
import torch
from spillover.kernels import native
from spillover.kernels.linear import linear, pack
from spillover.kernels.norm import rms_norm
w = pack(torch.eye(40, 16))
assert linear(torch.ones(3, 16), w).sum() == 48
assert rms_norm(torch.ones(2, 8), torch.ones(8), 0.0).sum() == 16
print(native.describe())
"""


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | environment, capture_output=True, text=True, check=True
    )


def test_it_can_be_turned_off() -> None:
    done = run(SPILLOVER_NATIVE="0")
    assert "off (SPILLOVER_NATIVE=0)" in done.stdout
    assert "Warning" not in done.stderr


def test_without_a_compiler_one_warning_says_so(tmp_path: Path) -> None:
    done = run(PATH=str(tmp_path), CXX="", SPILLOVER_CACHE=str(tmp_path))
    assert "off (no C++ compiler" in done.stdout
    assert done.stderr.count("RuntimeWarning") == 1


def test_a_compiler_that_fails_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such option >&2\nexit 1\n")
    broken.chmod(0o755)
    done = run(CXX=str(broken), SPILLOVER_CACHE=str(tmp_path))
    assert "broken failed: no such option" in done.stdout


@pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
def test_it_is_built_once_and_kept(tmp_path: Path) -> None:
    assert "on, panels of" in run(SPILLOVER_CACHE=str(tmp_path)).stdout
    (built,) = (tmp_path / "native").iterdir()
    written = built.stat().st_mtime_ns
    assert str(built) in run(SPILLOVER_CACHE=str(tmp_path)).stdout
    assert built.stat().st_mtime_ns == written
