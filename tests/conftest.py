"""Paths and models that tests in several folders share."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Set before torch loads OpenMP: tests run many processes on few cores, where spinning threads delay all others.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Each parallel test worker uses one core. Kernels are nevertheless tested with various numbers of threads.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests start hundreds of processes that import hundreds of modules each: write bytecode, so that each is compiled once.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None) is not None:
    sys.dont_write_bytecode = False

# Set before Triton is loaded: without a GPU its kernels run in its interpreter.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

# A shell that starts the tests in the background makes them, and every process that they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
for _folder in (TESTS, TESTS.parent / "benchmarks"):  # shared test code in `support`; benchmark scripts with tests
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))
pytest.register_assert_rewrite("support")  # assertions that fail there are explained as in a test

# Tests share the cores, so slow data generation is not a fault; nor is a high share of rejected plans, as the tests
# draw more until they have enough. CI draws the same examples every time.
_profile = settings.get_profile("ci" if os.environ.get("CI") else "default")
settings.register_profile("shared cores", _profile,
                          suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
settings.load_profile("shared cores")

SHARED_DATA = TESTS.parent.parent / "shared" / "data"
BUDGET_MINUTES = 20  # budget of a whole run; CI only warns above it, because the speed of a machine is not a fault
STARTED = time.monotonic()
ALLOWED_SKIPS = [line for line in (TESTS / "allowed_skips.txt").read_text().splitlines() if line and line[0] != "#"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures-to", metavar="FILE", default=None,
                     help="Append every failure to a file as it happens, for a run that may be cut off.")
    parser.addoption("--results-to", metavar="FILE", default=None,
                     help="Write what passed, failed and was skipped to a JSON file, with the code and the machine.")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--failures-to")
    if path is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(_Failures(Path(path)))


class _Failures:
    """Writes each failure to a file as soon as it is reported, in the reporting process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self._path.open("a") as written:
                written.write(f"== {report.nodeid} ({report.when})\n{report.longreprtext}\n")


def _skips(config: pytest.Config) -> Counter[str]:
    """Return the number of tests, or whole modules, skipped for each reason; only in the reporting process."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter is not None else []
    return Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)


def _unforeseen(skips: Counter[str]) -> list[str]:
    return [reason for reason in skips if not any(re.match(allowed, reason) for allowed in ALLOWED_SKIPS)]


def _write_results(path: Path, config: pytest.Config) -> None:
    """Write the outcome of a run as JSON; only in the reporting process."""
    from made_by import made_by

    stats = config.pluginmanager.get_plugin("terminalreporter").stats
    failed = sorted({report.nodeid for kind in ("failed", "error") for report in stats.get(kind, [])})
    path.write_text(json.dumps({"passed": len(stats.get("passed", [])), "failed": failed,
                                "skipped": dict(_skips(config)), "seconds": round(time.monotonic() - STARTED),
                                **made_by()}, indent=1) + "\n")


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--results-to")
    if path is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        _write_results(Path(path), session.config)
    if os.environ.get("CI") and session.exitstatus == pytest.ExitCode.OK and _unforeseen(_skips(session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skips = _skips(config)
    if skips:
        terminalreporter.write_line(f"skipped: {skips.total()}, for {len(skips)} reasons")
    if os.environ.get("CI"):
        for reason in _unforeseen(skips):
            terminalreporter.write_line(f"FAILED: skipped, and not in tests/allowed_skips.txt: {reason}", red=True)
        minutes = (time.monotonic() - STARTED) / 60
        terminalreporter.write_line(f"{minutes:.1f} minutes of a budget of {BUDGET_MINUTES}")
        if minutes > BUDGET_MINUTES:
            terminalreporter.write_line("WARNING: above the budget; --durations says where they went", yellow=True)


@pytest.fixture(autouse=True)
def _the_same_numbers_every_time() -> None:
    """Seed torch, so that a test draws the same numbers whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _small_pools() -> None:
    from support.small_pools import install

    install()


@pytest.fixture(autouse=True)
def _a_share_of_the_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a small memory budget to engines without one: several tests share a device, so none may take all of it."""
    if request.node.get_closest_marker("gpu") is not None:
        from support.device_share import share_device

        share_device(monkeypatch)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of traces and evaluation sets next to the checkout; it is never part of the repository."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no evaluation data at {SHARED_DATA}")
    return SHARED_DATA
