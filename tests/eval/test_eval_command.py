"""`spill eval` and `spill eval compare` as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from spillover.cli.main import main


def spill(*words: object) -> Result:
    return CliRunner().invoke(main, ["eval", *(str(word) for word in words)])


def test_tasks_are_run_compared_and_continued(model: Path, data: Path, tmp_path: Path) -> None:
    flags = [model, "--task", "hellaswag=hellaswag_val_full.txt", "--task", "perplexity", "--data", data, "--limit", 4,
             "--window", 200, "--max-model-len", 512, "--num-gpu-blocks-override", 400,
             "--reference", model, "--reference-dir", tmp_path / "said"]
    for name, more in (("full", []), ("int8", ["--kv-cache-dtype", "int8"])):
        result = spill(*flags, "--output", tmp_path / f"{name}.jsonl", *more)
        assert result.exit_code == 0, result.output
        for metric in ("acc_norm", "perplexity", "bits_per_byte", "kl_divergence", "top1_agreement"):
            assert metric in result.stdout
    assert (tmp_path / "said" / "0.3.npy").is_file()
    before = (tmp_path / "full.jsonl").read_bytes()
    assert before.count(b"\n") == 2 + 4 + 4
    found = {}
    for name in ("full", "int8"):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        found[name] = sum(row["values"]["kl"] for row in rows if "kl" in row.get("values", {})) / 800
        assert rows[0]["settings"]["model"] == f"{model}{' --kv-cache-dtype int8' if name == 'int8' else ''}"
    assert found["full"] < 1e-6 < found["int8"], "the reference's own KV is not quantised"

    result = spill("compare", tmp_path / "full.jsonl", tmp_path / "int8.jsonl")
    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    verdicts = {tuple(row[:2]): row[-1] for row in rows}
    assert set(verdicts) == {("hellaswag", "acc"), ("hellaswag", "acc_norm"), ("perplexity", "perplexity"),
                             ("perplexity", "kl_divergence"), ("perplexity", "top1_agreement")}
    assert verdicts["hellaswag", "acc"] == "no difference shown"
    assert verdicts["perplexity", "kl_divergence"] == "worse"

    again = spill(*flags, "--output", tmp_path / "full.jsonl")
    assert again.exit_code == 0, again.output
    assert (tmp_path / "full.jsonl").read_bytes() == before
    other = spill(*flags, "--output", tmp_path / "full.jsonl", "--kv-cache-dtype", "fp8")
    assert other.exit_code == 2
    assert "choose another --output" in other.output


@pytest.mark.parametrize(("words", "said"), [
    ([], "Missing option '--task'"),
    (["--task", "helaswag"], "there is no task 'helaswag'; did you mean 'hellaswag'"),
    (["--task", "hellaswag", "--task", "hellaswag=other"], "--task hellaswag was given twice"),
    (["--task", "hellaswag", "--data", "/absent"], "looked for /absent/hellaswag_val_full.txt.bz2"),
    (["--task", "gsm8k", "--reference", "x"], "add --task perplexity=FILE"),
    (["http://127.0.0.1:9", "--task", "mmlu", "--dtype", "float32"], "--dtype is for a model in this process"),
    (["http://127.0.0.1:9", "--task", "mmlu"], "no server answers at http://127.0.0.1:9"),
    (["--task", "perplexity", "--window", "8", "--stride", "9"], "--stride is from 1 to --window (8); got 9"),
    (["compare", "/absent", "/absent"], "cannot read '/absent'"),
])
def test_what_cannot_be_is_refused_before_anything_is_loaded(words: list[str], said: str, data: Path) -> None:
    if words and words[0] != "compare" and "--data" not in words:
        words = [*words, "--data", str(data)]
    result = spill(*words)
    assert result.exit_code == 2
    assert said in result.output


def test_results_of_other_data_are_not_compared(tmp_path: Path) -> None:
    for name, task, digest in (("a", "mmlu", "1"), ("b", "mmlu", "2"), ("c", "gsm8k", "1")):
        (tmp_path / name).write_text(
            json.dumps({"task": task, "settings": {"model": name, "sha256": digest}}) + "\n"
            + json.dumps({"task": task, "id": "0", "values": {"acc": 1.0}}) + "\n")
    assert "sha256 is '1' in one and '2' in the other" in spill("compare", tmp_path / "a", tmp_path / "b").output
    assert "no task in common" in spill("compare", tmp_path / "a", tmp_path / "c").output


def test_perplexity_is_compared_where_only_one_has_a_reference(tmp_path: Path) -> None:
    for name, more, values in (("a", {}, {}), ("b", {"reference": "x", "divergence": "full vocabulary"}, {"kl": 1.0})):
        (tmp_path / name).write_text(
            json.dumps({"task": "perplexity", "settings": {"model": name, "window": 8, **more}}) + "\n"
            + json.dumps({"task": "perplexity", "id": "0.0", "values": {"logprob": -9.0, "tokens": 8} | values}) + "\n")
    result = spill("compare", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 0, result.output
    assert "3.0802" in result.stdout
    assert "kl_divergence" not in result.stdout


def test_help_speaks_of_both() -> None:
    text = spill("--help").output
    assert text.startswith("Usage: spill eval [OPTIONS] [MODEL]")
    assert "spill eval compare" in text
