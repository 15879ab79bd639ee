"""`spill pool serve` owns a pool until it is stopped, and `spill cache` shows its content."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from spillover.cli.main import main
from spillover.memory.shared_pool.tier import SharedPoolTier
from support.pool_process import mapped_pools
from support.tier_calls import IDENTITY, OTHER_IDENTITY, block_bytes, block_key, close, no_wake, put

PAYLOAD = 5000
ABOUT = {"model": "tiny", "dtype": "bfloat16", "kv_cache_dtype": "auto", "spill_dtype": "int8", "block_size": "16"}


def spill(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a runtime folder with a short path, because the path of a socket is limited."""
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


@pytest.fixture
def served(runtime: Path) -> Iterator[subprocess.Popen[str]]:
    program = "from spillover.cli.main import main; main()"
    process = subprocess.Popen([sys.executable, "-c", program, "pool", "serve", "--memory", "4MB"], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert process.stdout is not None
    try:
        assert "shared pool of" in process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def fill(runtime: Path, identity: bytes = IDENTITY, count: int = 6) -> SharedPoolTier:
    tier = SharedPoolTier(runtime / "spillover" / "pool.sock", PAYLOAD, identity, ABOUT, no_wake,
                          timeout=20.0, lookup_timeout=20.0)
    assert all(put(tier, {block_key(number): block_bytes(number, PAYLOAD) for number in range(count)}))
    return tier


def models() -> dict[str, int]:
    shown = json.loads(spill("cache", "ls", "auto", "--json").stdout)
    return {model["identity"]: model["blocks"] for model in shown["models"]}


def test_ls_and_prune(runtime: Path, served: subprocess.Popen[str]) -> None:
    one, two = fill(runtime), fill(runtime, OTHER_IDENTITY, 4)
    page = spill("cache", "ls", str(runtime / "spillover" / "pool.sock"))
    assert page.exit_code == 0, page.output
    for words in ("tiny", "bfloat16", "int8", "2 engines connected", IDENTITY.hex()[:8], str(served.pid)):
        assert words in page.stdout
    assert models() == {IDENTITY.hex(): 6, OTHER_IDENTITY.hex(): 4}
    assert "2 blocks dropped" in spill("cache", "prune", "auto", "--size", str(8 * PAYLOAD)).stdout
    assert spill("cache", "prune", "auto", "--identity", OTHER_IDENTITY.hex()[:8]).exit_code == 0
    assert models() == {IDENTITY.hex(): 4, OTHER_IDENTITY.hex(): 0}
    assert json.loads(spill("cache", "prune", "auto", "--older-than", "1h", "--json").stdout)["blocks"] == 0
    refused = spill("cache", "prune", "auto", "--identity", "ffff")
    assert refused.exit_code == 2
    assert "no models" in refused.stderr
    close(one)
    close(two)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_clean_end_leaves_nothing(runtime: Path, served: subprocess.Popen[str], how: signal.Signals) -> None:
    before = set(os.listdir("/dev/shm"))
    tier = fill(runtime)
    served.send_signal(how)
    assert served.wait(10) == 0
    assert [name for name in os.listdir(runtime / "spillover") if not name.endswith(".lock")] == []
    assert set(os.listdir("/dev/shm")) <= before
    close(tier)
    assert mapped_pools() == 0
    missing = spill("cache", "ls", "auto")
    assert missing.exit_code == 2
    assert "no process serves it; `spill pool serve`" in missing.stderr


def test_refusals_are_one_sentence(runtime: Path, served: subprocess.Popen[str]) -> None:
    for arguments, words in [
        (["--memory", "4MB"], f"already, by process {served.pid}"),
        (["--memory", "much"], "'much' is not a size"),
        (["--memory", "900TB"], "are available"),
        (["--memory", "4MB", "--socket", "/" + "x" * 200], "at most 107 bytes"),
        (["--memory", "4MB", "--socket", "/proc/none/sock"], "/proc/none cannot be used"),
    ]:
        refused = spill("pool", "serve", *arguments)
        assert refused.exit_code == 2, arguments
        assert words in refused.stderr
        assert refused.stderr.count("\n") == 1
    started = time.monotonic()
    assert spill("pool", "serve").exit_code == 2
    assert time.monotonic() - started < 10
