"""`spill simulate`: from a trace file to a table and JSON, and errors in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from spillover.cli.main import main
from support.models.hf_reference import save_checkpoint, tiny_model

MOONCAKE = "\n".join(json.dumps({"timestamp": 100 * place, "input_length": 600, "output_length": 5,
                                 "hash_ids": [0, place + 1]}) for place in range(8))
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47.1,200,3\n"
QUICK = ["--costs", "4,0.05", "--num-blocks", "500"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.jsonl").write_text(MOONCAKE)
    (tmp_path / "trace.csv").write_text(AZURE)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments])


def test_a_trace_becomes_a_table_and_json(here: Path) -> None:
    result = run("trace.jsonl", *QUICK, "--replicas", "1,2", "--policy", "predicted,round-robin", "--split", "1+1",
                 "--kv-bytes-per-token", "1000", "--replica-cost", "2", "--output-json", "out.json")
    assert result.exit_code == 0, result.output
    assert "not compared with real runs" in result.output
    assert "given, not measured" in result.output
    written = json.loads((here / "out.json").read_text())
    assert [(row["replicas"], row["decode_replicas"], row["policy"]) for row in written["results"]] == [
        (prefill, decode, policy) for prefill, decode in ((1, 0), (2, 0), (1, 1))
        for policy in ("predicted", "round-robin")]
    assert written["reusable"] == pytest.approx(7 * 512 / (8 * 600))
    assert written["results"][0]["hit_rate"] == pytest.approx(written["reusable"])
    for row in written["results"]:
        assert row["requests"] == 8
        assert 0 < row["ttft_p50"] <= row["ttft_p95"] <= row["ttft_p99"]
        assert row["cost_per_million_tokens"] > 0


def test_a_trace_that_says_nothing_of_prefixes_has_no_reuse(here: Path) -> None:
    result = run("trace.csv", *QUICK, "--output-json", "out.json")
    assert result.exit_code == 0, result.output
    assert "does not say which prompts share a prefix" in result.output
    assert json.loads((here / "out.json").read_text())["results"][0]["hit_rate"] == 0


def test_costs_are_measured_with_a_model_and_kept(here: Path) -> None:
    model, _ = tiny_model("llama", seed=3)
    folder = save_checkpoint(model, here / "tiny")
    result = run("trace.jsonl", "--costs", "measure", "--model", str(folder), "--save-costs", "costs.json",
                 "--num-blocks", "500")
    assert result.exit_code == 0, result.output
    assert "measured steps fitted within" in result.output
    costs = json.loads((here / "costs.json").read_text())
    assert {point["decode_rows"] for point in costs["points"]} >= {1, 4, 16}
    assert max(point["prefill_tokens"] for point in costs["points"]) >= 16
    assert all(point["seconds"] > 0 for point in costs["points"])
    assert costs["kv_bytes_per_token"] > 0
    again = run("trace.jsonl", "--costs", "costs.json", "--num-blocks", "500", "--split", "1+1")
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize(("text", "words"), [
    (MOONCAKE + "\n{}", "row 9 of"),
    (MOONCAKE + "\n{\"timestamp\": 1", "row 9 of"),
    (MOONCAKE.replace("600", "6000"), "do not make 6000 tokens"),
    (AZURE + "yesterday,1,1\n", "row 3 of"),
    ("time,tokens\n1,2\n", "it has no column"),
    ("", "no column"),
])
def test_a_malformed_line_is_named(here: Path, text: str, words: str) -> None:
    (here / "trace.jsonl").write_text(text)
    result = run("trace.jsonl", *QUICK)
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(("arguments", "words"), [
    (["nowhere.jsonl", *QUICK], "cannot read the trace"),
    (["trace.jsonl", "--costs", "nowhere.json"], "cannot read --costs"),
    (["trace.jsonl", "--costs", "4,-1"], "milliseconds of a step"),
    (["trace.jsonl", "--costs", "4,0.05"], "give --num-blocks"),
    (["trace.jsonl", *QUICK, "--replicas", "0"], "0"),
    (["trace.jsonl", *QUICK, "--policy", "best"], "is not one of"),
    (["trace.jsonl", *QUICK, "--split", "3"], "such as 3+1"),
    (["trace.jsonl", *QUICK, "--split", "1+1"], "give --kv-bytes-per-token"),
    (["trace.jsonl", *QUICK, "--model", "x"], "with --costs measure"),
    (["trace.jsonl", *QUICK, "--save-costs", "x"], "give both, or neither"),
    (["trace.jsonl", *QUICK, "--calibration", "nowhere.json"], "cannot read --calibration"),
    (["trace.jsonl", *QUICK, "--output-json", "nowhere/x.json"], "no such folder"),
    (["trace.jsonl", *QUICK, "--trace-limit", "0"], "--trace-limit must be at least 1"),
])
def test_a_flag_that_cannot_be_is_answered_in_one_sentence(here: Path, arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert len(result.output.strip().splitlines()) == 1
