"""Progress while waiting: each stage is shown by name with its progress; without a terminal, as plain lines."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import first_run
import pytest
from rich.console import Console

from spillover import progress
from spillover.progress import CAPTURING, COMPILING, WEIGHTS, stages


def drawn(terminal: bool) -> tuple[Console, io.StringIO]:
    screen = io.StringIO()
    return Console(file=screen, force_terminal=terminal, width=120, _environ={}), screen


def test_a_terminal_shows_each_stage_with_its_progress() -> None:
    console, screen = drawn(True)
    with stages(console) as show:
        assert screen.getvalue() == ""  # nothing is drawn before the first stage
        show(COMPILING, 0, 14)
        show(COMPILING, 5, 14)
        show(WEIGHTS, 3 << 20, 6 << 20)
    text = screen.getvalue()
    assert f"{COMPILING}" in text
    assert "3.0 MiB of 6.0 MiB" in text
    assert text.index(COMPILING) < text.index(WEIGHTS)


def test_a_log_gets_a_line_for_what_takes_long_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    console, screen = drawn(False)
    with stages(console) as show:
        show("Reading the tokenizer", 0, 0)
        for done in range(14):
            show(COMPILING, done, 14)
        show(WEIGHTS, 1, 2)
    assert screen.getvalue().splitlines() == [COMPILING]
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    with stages(console) as show:
        show(CAPTURING, 0, 4)
        show(CAPTURING, 2, 4)
    assert screen.getvalue().splitlines()[1:] == [CAPTURING, f"{CAPTURING}: 50%"]


def test_a_first_load_says_that_it_compiles_and_loads(tmp_path: Path) -> None:
    """A first load, with an empty cache, reports compiling and loading; the failing compiler saves time."""
    script = """
import sys
sys.path[:0] = sys.argv[2:]
import fuzz_models
from pathlib import Path
from spillover import LLM
folder = Path(sys.argv[1])
fuzz_models.write_seeds(folder)
seen = []
with LLM(str(folder / "folder-llama"), device="cpu", gpu_memory="2GB", progress=lambda *step: seen.append(step)):
    pass
stages = list(dict.fromkeys(stage for _, _, stage in seen))
print(stages)
"""
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    environment = os.environ | {"SPILLOVER_CACHE": str(tmp_path / "cache"), "CXX": str(compiler)}
    environment.pop("SPILLOVER_NATIVE", None)
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "models"), *sys.path],
                            env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(["Reading the tokenizer", "Planning the memory", COMPILING, WEIGHTS])


def test_the_script_that_times_a_first_run_sees_gaps_and_leftovers(tmp_path: Path) -> None:
    done = first_run.run(("--version",), tmp_path)
    assert done.status == 0
    assert any("spill" in line for _, line in done.lines)
    assert 0 < done.gap <= done.seconds
    assert done.left_behind == []
    (tmp_path / "tmp" / "leftover").mkdir()
    assert first_run.run(("--version",), tmp_path).left_behind == ["tmp/leftover"]
