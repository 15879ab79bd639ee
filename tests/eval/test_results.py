"""A results file is appended item by item and continued: after a kill, with more items, not with other settings."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from spillover.errors import SpilloverError
from spillover.eval.in_process import EngineTarget
from spillover.eval.results import Results
from spillover.eval.run import run
from spillover.eval.tasks.named import open_task
from support.servers.running_server import SPILL


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_killed_run_is_continued_to_the_same_numbers(target: EngineTarget, model: Path, data: Path,
                                                       tmp_path: Path) -> None:
    path = tmp_path / "killed.jsonl"
    process = subprocess.Popen(
        [*SPILL, "eval", str(model), "--task", f"perplexity={data / 'perplexity.txt'}", "--window", "256",
         "--stride", "1", "--concurrency", "1", "--max-model-len", "512",
         "--num-gpu-blocks-override", "100", "--output", str(path)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < 5:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with path.open("ab") as file:  # as after a kill in the middle of a line
        file.write(b'{"task": "perplexity", "id": "0.')
    killed = path.read_bytes().count(b"\n")

    task = open_task("perplexity", data, 256, 1, None)
    items = list(task.items(target))
    kept = items[:killed + 20]
    assert killed - 1 < len(kept) < len(items), "it was killed before its end"
    continued, fresh = Results(path), Results()
    continued.settings["perplexity"]["model"] = "tiny"  # the same model under another name
    for results in (continued, fresh):
        run(task, target, kept, results, 4)
    continued.close()
    assert continued.items == fresh.items
    ids = [line["id"] for line in lines(path) if "id" in line]
    assert sorted(ids) == sorted(item.id for item in kept), "each item once"


def test_what_is_there_is_not_asked_again(target: EngineTarget, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    task = open_task("arc-easy", data, 1, 1, None)
    items = task.items(target)
    asked = []
    original = task.ask
    task.ask = lambda target, item: (asked.append(item.id), original(target, item))[1]  # type: ignore[method-assign]
    for count in (2, 5):
        results = Results(path)
        run(task, target, items[:count], results, 2)
        results.close()
    assert sorted(asked) == ["0", "1", "2", "3", "4"]
    assert lines(path)[0]["settings"] == {"model": "tiny", **task.settings}


def test_results_of_something_else_are_not_continued(target: EngineTarget, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = Results(path)
    results.begin("perplexity", {"window": 8})
    with pytest.raises(SpilloverError, match="perplexity with window 8, and now it is 16; choose another --output"):
        results.begin("perplexity", {"window": 16})
    (tmp_path / "other").write_text("hello\n")
    with pytest.raises(SpilloverError, match=r"not a results file of spill eval: its line 1 is 'hello"):
        Results(tmp_path / "other")
    with pytest.raises(SpilloverError, match="cannot write --output"):
        Results(tmp_path / "absent" / "out.jsonl")
    with pytest.raises(SpilloverError, match="cannot read"):
        Results.load(tmp_path / "absent.jsonl")


def test_an_error_ends_the_run_and_keeps_what_was_done(target: EngineTarget, data: Path) -> None:
    task = open_task("arc-easy", data, 1, 1, None)
    original = task.ask

    def ask(target: EngineTarget, item):  # type: ignore[no-untyped-def]
        if item.id == "3":
            raise SpilloverError("gone")
        return original(target, item)

    task.ask = ask  # type: ignore[method-assign]
    results = Results()
    with pytest.raises(SpilloverError, match="gone"):
        run(task, target, task.items(target), results, 1)
    assert list(results.items["arc-easy"]) == ["0", "1", "2"]
