"""Paths and models that tests in several folders share."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch loads its OpenMP: tests run several processes on few cores, where threads that spin hold up the others.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Several tests at once share the cores: each has one. Kernels are tested with any number of threads all the same.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before Triton is loaded: without a GPU its kernels run in its interpreter.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
for _folder in (TESTS, TESTS.parent / "benchmarks"):  # the package of what tests share; the scripts that are tested too
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))

# Tests share the cores, so that an example takes long to draw is no finding; nor is it that many plans are refused, of
# which the tests ask for others until they have enough. CI draws the same ones every time.
_profile = settings.get_profile("ci" if os.environ.get("CI") else "default")
settings.register_profile("shared cores", _profile,
                          suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
settings.load_profile("shared cores")

SHARED_DATA = TESTS.parent.parent / "shared" / "data"


@pytest.fixture(autouse=True)
def _the_same_numbers_every_time() -> None:
    """Whatever ran before, and in whatever order."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Traces and evaluation sets that lie beside a checkout; never part of it."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no evaluation data at {SHARED_DATA}")
    return SHARED_DATA
