"""`spill bench serve` and `spill bench sweep` as typed, with a server that has no model."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from spillover.cli.main import main
from support.servers.mock_server import MockServer

SMALL = ["--num-prompts", "6", "--random-input-len", "12", "--random-output-len", "4"]


@pytest.fixture(scope="module")
def mock() -> Iterator[MockServer]:
    with MockServer(ttft=0.01, itl=0.002) as server:
        yield server


def spill(*words: str) -> Result:
    return CliRunner().invoke(main, ["bench", *words])


def test_serve_prints_the_block_and_writes_the_result(mock: MockServer, tmp_path: Path) -> None:
    before = len(mock.log())
    result = spill("serve", "--base-url", mock.url + "/v1", *SMALL, "--request-rate", "100", "--goodput", "ttft:500",
                   "tpot:50", "--save-result", "--save-detailed", "--result-dir", str(tmp_path / "new"),
                   "--result-filename", "r.json", "--metadata", "gpu=none", "run=1", "--num-warmups", "2",
                   "--metric-percentiles", "50,99.9", "--percentile-metrics", "ttft,e2el", "--temperature", "0")
    assert result.exit_code == 0, result.output
    for line in ("Successful requests:                     6", "Request goodput (req/s):", "P99.9 E2EL (ms):",
                 "Throughput: ", "Workload random"):
        assert line in result.output
    assert "ITL (ms)" not in result.output
    written = json.loads((tmp_path / "new" / "r.json").read_text())
    assert (written["completed"], written["gpu"], written["run"]) == (6, "none", "1")
    assert written["total_output_tokens"] == 24
    assert written["total_input_tokens"] == 72
    assert len(written["records"]) == 6
    sent = [tuple(entry["prompt"]) for entry in mock.log()[before:]]
    assert len(sent) == 8
    assert not set(sent[:2]) & set(sent[2:]), "no warm-up prompt is measured"


def test_a_file_is_named_as_vllm_names_it_and_can_be_added_to(mock: MockServer, tmp_path: Path) -> None:
    result = spill("serve", "--base-url", mock.url, *SMALL, "--max-concurrency", "2", "--save-result", "--label",
                   "mine", "--result-dir", str(tmp_path))
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("mine-infqps-concurrency2-mock-"), result.output
    for _ in range(2):
        spill("serve", "--base-url", mock.url, *SMALL, "--append-result", "--result-dir", str(tmp_path),
              "--result-filename", "all.jsonl")
    assert [json.loads(line)["completed"] for line in (tmp_path / "all.jsonl").read_text().splitlines()] == [6, 6]


def test_lists_of_rates_make_a_run_each_and_a_table(mock: MockServer, tmp_path: Path) -> None:
    before = len(mock.log())
    result = spill("serve", "--base-url", mock.url, *SMALL, "--request-rate", "40,80,inf", "--max-concurrency", "1,4",
                   "--num-warmups", "0", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json",
                   "--goodput", "ttft:500")
    assert result.exit_code == 0, result.output
    assert result.output.count("Serving Benchmark Result") == 6
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in
            result.output.split("All runs")[1].splitlines() if line.startswith("│")]
    assert [row[:3] for row in rows] == [[rate, limit, "6"] for limit in "14" for rate in ("40", "80", "inf")]
    written = {file.name: json.loads(file.read_text()) for file in tmp_path.iterdir()}
    assert set(written) == {f"r-{rate}qps-concurrency{limit}.json" for limit in "14" for rate in ("40", "80", "inf")}
    assert written["r-40qps-concurrency4.json"]["request_rate"] == 40
    assert written["r-40qps-concurrency4.json"]["max_concurrency"] == 4
    sent = [tuple(entry["prompt"]) for entry in mock.log()[before:]]
    assert len(set(sent)) == 36, "no prompt is measured twice"


def test_one_bad_rate_of_a_list_is_refused_before_any_is_run(mock: MockServer) -> None:
    before = len(mock.log())
    for words, said in ((["--request-rate", "40,0"], "--request-rate"), (["--request-rate", "40,fast"], "'fast'"),
                        (["--max-concurrency", "4,0"], "--max-concurrency")):
        result = spill("serve", "--base-url", mock.url, *SMALL, *words)
        assert (result.exit_code, said in result.output) == (2, True), result.output
    assert len(mock.log()) == before


def test_chat_sends_text(mock: MockServer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one two three", "output_tokens": 3}\n{"prompt": "four five", "output_tokens": 3}\n')
    result = spill("serve", "--base-url", mock.url, "--backend", "openai-chat", "--dataset-name", "custom",
                   "--dataset-path", str(file), "--num-prompts", "2", "--num-warmups", "0")
    assert result.exit_code == 0, result.output
    assert mock.log()[-1]["prompt"][0]["role"] == "user"


def test_sweep_prints_a_table_and_what_it_found(mock: MockServer, tmp_path: Path) -> None:
    result = spill("sweep", "--base-url", mock.url, *SMALL, "--steps", "3", "--max-concurrency", "4", "--goodput",
                   "ttft:500", "tpot:50", "--save-result", str(tmp_path / "sweep.json"))
    assert result.exit_code == 0, result.output
    assert "Max throughput:" in result.output
    assert "Max rate with 99% of requests within ttft 500 ms, tpot 50 ms:" in result.output
    assert len(json.loads((tmp_path / "sweep.json").read_text())["steps"]) >= 3


def test_two_client_processes_from_a_real_command(mock: MockServer, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", "from spillover.cli.main import main; main()", "bench", "serve",
                           "--base-url", mock.url, *SMALL, "--client-processes", "2", "--max-concurrency", "4",
                           "--save-result", "--result-dir", str(tmp_path)],
                          capture_output=True, text=True, timeout=60, check=False,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr
    assert "Successful requests:                     6" in done.stdout
    [saved] = tmp_path.glob("*.json")
    assert json.loads(saved.read_text())["client"]["processes"] == 2


def test_without_a_server_it_says_how_to_start_one() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        result = spill("serve", "--port", str(unused.getsockname()[1]), *SMALL, "--ready-check-timeout-sec", "0.1")
    assert result.exit_code == 2
    assert "Waiting for http://127.0.0.1" in result.output
    assert "spill serve" in result.output
    assert "--base-url" in result.output


@pytest.mark.parametrize(("words", "said"), [
    (["--request-rate", "0"], "--request-rate"),
    (["--request-rate", "fast"], "neither a number nor inf"),
    (["--goodput", "speed:5"], "ttft:500 tpot:50"),
    (["--metadata", "nothing"], "KEY=VALUE"),
    (["--percentile-metrics", "ttft,speed"], "speed"),
    (["--metric-percentiles", "101"], "from 0 to 100"),
    (["--extra-body", "[1]"], "JSON object"),
    (["--ramp-up-strategy", "linear"], "--ramp-up-start-rps"),
    (["--model", "absent"], "absent"),
    (["--max-concurency", "4"], "did you mean --max-concurrency"),
    (["--extra-body", '{"mock": {"status": 500}}'], "HTTP 500: as asked"),
])
def test_what_cannot_be_is_refused_in_words(mock: MockServer, words: list[str], said: str) -> None:
    result = spill("serve", "--base-url", mock.url, *SMALL, *words)
    assert result.exit_code == 2
    assert said in result.output
