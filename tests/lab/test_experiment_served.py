"""Experiments over real sockets: a server in a separate process, the real load generator, the real command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from spillover.cli.main import main
from spillover.lab.analysis import analysis_of
from spillover.lab.experiment import parse_experiment
from spillover.lab.run import Bench, run_experiment
from spillover.lab.store import Results
from spillover.lab.traffic import ServedLoad
from support.servers.mock_server import MockServer

# 12 requests, four at a time, 30 ms each: a tenth of a second.
LOAD = {"dataset-name": "random", "num-prompts": 12, "random-input-len": 32, "random-output-len": 6,
        "max-concurrency": 4}


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[MockServer, MockServer]]:
    with MockServer(ttft=0.01, itl=0.004) as one, MockServer(ttft=0.01, itl=0.004) as other:
        yield one, other


def set_speed(server: MockServer, factor: float) -> None:
    request = urllib.request.Request(server.url + "/speed", json.dumps({"factor": factor}).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=10):
        pass


def document(servers: tuple[MockServer, MockServer], **changes: Any) -> dict[str, Any]:
    return {"name": "mock", "about": "Mock servers.", "max-blocks": 3, "restart": "never", "warmups": 2,
            "gates": dict.fromkeys(("client-saturated", "cold-start", "rate"), False),  # machine-dependent gates
            "arms": {name: {"engine": "url", "url": server.url} for name, server in zip("ab", servers, strict=True)},
            "workloads": {"load": LOAD}, **changes}


@pytest.mark.alone
def test_a_server_that_is_slower_is_found(servers: tuple[MockServer, MockServer], tmp_path: Path) -> None:
    for server, factor in zip(servers, (5.0, 7.5), strict=True):  # 150 and 225 ms per request: long compared with noise
        set_speed(server, factor)
    made = parse_experiment(document(servers, **{"max-blocks": 10}))
    analysis = analysis_of(run_experiment(made, tmp_path / "r", Bench(ServedLoad(made), settle_seconds=0.0)))
    for server in servers:
        set_speed(server, 1.0)
    assert [cell["faults"] for cell in analysis["cells"]] == [[], []]
    verdict = next(verdict for verdict in analysis["verdicts"] if verdict["primary"])
    assert verdict["verdict"] == "slower", verdict["text"]
    assert verdict["ratio"] == pytest.approx(2 / 3, rel=0.1)


def test_every_run_of_a_server_has_prompts_of_its_own(tmp_path: Path) -> None:
    with MockServer(ttft=0.001, itl=0.001) as one, MockServer(ttft=0.001, itl=0.001) as other:
        made = parse_experiment(document((one, other), **{"max-blocks": 1}, workloads={
            "load": {**LOAD, "max-concurrency": None, "sweep": {"request-rate": [200, 400]}}}))
        results = run_experiment(made, tmp_path / "r", Bench(ServedLoad(made), settle_seconds=0.0))
        prompts = [[tuple(entry["prompt"]) for entry in server.log() if len(entry["prompt"]) == 32]
                   for server in (one, other)]
    measured = [[prompt for prompt in each if each.count(prompt) == 1] for each in prompts]
    assert [len(each) for each in measured] == [48, 48]  # 12 in each of two passes at two rates; warm-ups are repeated
    assert set(measured[0]) == set(measured[1])
    assert {visit["details"]["arrival"] for visit in results.visits} == {"poisson"}


def test_requests_that_fail_make_a_run_invalid(servers: tuple[MockServer, MockServer], tmp_path: Path) -> None:
    made = parse_experiment(document(servers, **{"max-blocks": 1}, workloads={
        "load": {**LOAD, "extra-body": {"mock": {"fail_at": 3}}}}))
    analysis = analysis_of(run_experiment(made, tmp_path / "r", Bench(ServedLoad(made), settle_seconds=0.0)))
    assert {fault["gate"] for cell in analysis["cells"] for fault in cell["faults"]} == {"errors", "samples"}
    assert {verdict["verdict"] for verdict in analysis["verdicts"]} == {"no verdict"}


def spill(*words: str) -> Any:
    return CliRunner().invoke(main, list(words))


@pytest.fixture
def written(servers: tuple[MockServer, MockServer], tmp_path: Path) -> Path:
    path = tmp_path / "mock.yaml"
    path.write_text(json.dumps(document(servers)))  # JSON is YAML
    return path


def test_a_dry_run_shows_the_plan_and_leaves_nothing(written: Path, tmp_path: Path) -> None:
    shown = spill("lab", "run", str(written), "--dry-run", "--out", str(tmp_path / "r"))
    assert shown.exit_code == 0, shown.output
    told = " ".join(shown.output.split())
    assert "A block is 4 runs: load:a load:b load:b load:a" in told
    assert "start" not in told  # a running server is not started
    assert "(answers)" in told
    assert "at least 4 blocks, at most 3 blocks or 1 h" in told
    assert "There will be no verdict: max-blocks is 3, and 1 comparison at 0.99 confidence take at least 4" in told
    assert not (tmp_path / "r").exists()


def test_the_command_stopped_and_run_again_ends_in_a_report(servers: tuple[MockServer, MockServer],
                                                            tmp_path: Path) -> None:
    folder, written = tmp_path / "r", tmp_path / "mock.yaml"
    written.write_text(json.dumps(document(servers, **{"max-blocks": 2})))  # four visits per block
    command = [sys.executable, "-c", "from spillover.cli.main import main; main()", "lab", "run", str(written), "--out",
               str(folder), "--no-report"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ})
    end = time.monotonic() + 60
    while len(list((folder / "visits").glob("*.json"))) < 2 and time.monotonic() < end:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    before = {file.name: file.stat().st_mtime_ns for file in (folder / "visits").glob("*.json")}
    assert 2 <= len(before) < 8
    again = spill("lab", "run", str(written), "--out", str(folder), "--no-report")
    assert again.exit_code == 0, again.output
    assert "b against a on load, output_throughput: " in " ".join(again.output.split())
    results = Results.open(folder)
    assert len(results.visits) == 8
    assert len(results.sessions) == 2
    assert {name: (folder / "visits" / name).stat().st_mtime_ns for name in before} == before
    assert (folder / results.visits[0]["monitors"]).stat().st_size > 0
    assert spill("lab", "report", str(folder)).exit_code == 0
    assert (folder / "report.html").stat().st_size > 1000
    further = spill("lab", "run", str(written), "--out", str(folder), "--no-report", "--max-blocks", "3")
    assert further.exit_code == 0, further.output
    assert len(Results.open(folder).visits) == 12  # a limit may be raised: verdicts hold wherever it stops
    written.write_text(written.read_text().replace('"warmups": 2', '"warmups": 3'))
    other = spill("lab", "run", str(written), "--out", str(folder))
    assert other.exit_code == 2
    assert "holds results of another 'mock'" in other.output


@pytest.mark.parametrize(("wrong", "message"), [
    ({"num-promts": 3}, "num-prompts"),
    ({"request-rate": "fast"}, "request-rate is a number, or inf; got 'fast'"),
    ({"max-concurrency": 0}, "max-concurrency must be a whole number of at least 1; got '0'"),
    ({"backend": "openai-chats"}, "did you mean 'openai-chat'?"),
    ({"ramp-up-strategy": "steep"}, "linear or exponential"),
    ({"tokenizer": "folder"}, "that of the first server"),
])
def test_a_wrong_option_of_a_workload_is_refused_before_anything_is_started(
        servers: tuple[MockServer, MockServer], tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(json.dumps(document(servers, workloads={"load": {**LOAD, **wrong}})))
    refused = spill("lab", "run", str(path), "--out", str(tmp_path / "r"))
    assert refused.exit_code == 2
    assert "workload 'load'" in refused.output
    assert message in refused.output
    assert not (tmp_path / "r").exists()


def test_chats_are_sent_in_words_and_sampled_as_asked(tmp_path: Path) -> None:
    with MockServer(ttft=0.001, itl=0.001) as server:
        made = parse_experiment({**document((server, server)), "max-blocks": 1, "arms": {
            "a": {"engine": "url", "url": server.url}}, "workloads": {"load": {
                "dataset-name": "sharegpt", "dataset-path": str(_talks(tmp_path)), "backend": "openai-chat",
                "top-p": 0.5}}})
        results = run_experiment(made, tmp_path / "r", Bench(ServedLoad(made), settle_seconds=0.0))
        assert [visit["status"] for visit in results.visits] == ["ok", "ok"], results.visits[0]["reason"]
        asked = [entry["prompt"] for entry in server.log()]
    assert all(isinstance(prompt[0]["content"], str) for prompt in asked)
    assert results.visits[0]["details"]["endpoint"] == "/v1/chat/completions"


def _talks(folder: Path) -> Path:
    path = folder / "talks.json"
    words = "one two three four five six seven eight"
    path.write_text(json.dumps([{"conversations": [{"from": "human", "value": f"{words} {number}"},
                                                   {"from": "gpt", "value": words}]} for number in range(12)]))
    return path


def test_what_ships_is_listed() -> None:
    assert "spill lab run NAME" in spill("lab", "list").output
    presets = spill("lab", "list", "--presets")
    assert presets.exit_code == 0, presets.output
    assert "vllm" in presets.output
