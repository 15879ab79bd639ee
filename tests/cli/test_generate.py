"""`spill generate` accepts model and prompt in every usual way, and prints text, several texts, or all as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from spillover.cli.generate import _schema
from spillover.cli.main import main

NULL = ["--load-format", "null", "--max-model-len", "512", "--max-tokens", "4"]


def spill(*words: str, text: str | None = None) -> Result:
    return CliRunner().invoke(main, ["generate", *words, *NULL], input=text)


@pytest.mark.parametrize(("words", "text", "prompt"), [
    (["one two"], None, "one two"),
    (["-"], "from a pipe\n", "from a pipe\n"),
    ([], "from a pipe", "from a pipe"),
    (["SmolLM2-135M-Instruct", "one two"], None, "one two"),
    (["SmolLM2-135M-Instruct", "-"], "piped", "piped"),
    (["--model", "SmolLM2-135M-Instruct", "one two"], None, "one two"),
])
def test_the_prompt_and_the_model_are_taken(words: list[str], text: str | None, prompt: str) -> None:
    result = spill(*words, "--json", text=text)
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    answer = json.loads(line)
    assert answer["prompt"] == prompt
    (output,) = answer["outputs"]
    assert (len(output["token_ids"]), output["finish_reason"]) == (4, "length")
    assert answer["sources"]["computed"] == len(answer["prompt_token_ids"]) > 0
    assert answer["num_cached_tokens"] == 0
    assert answer["timings"]["first_token"] > 0


def test_several_completions() -> None:
    result = spill("one two", "-n", "3", "--temperature", "1", "--top-k", "5", "--min-p", "0.1")
    assert result.exit_code == 0, result.output
    assert [f"[{place}]" in result.stdout for place in (1, 2, 3, 4)] == [True, True, True, False]


@pytest.mark.parametrize(("words", "said"), [
    (["one", "two", "three"], "in quotes"),
    (["some-model", "prompt", "--model", "other"], "given twice"),
    (["one", "--schema", "{"], "--schema is not JSON"),
    (["one", "--schema", "/absent/schema.json"], "cannot read --schema '/absent/schema.json'"),
    (["one", "-n", "0"], "n must be at least 1"),
    (["one", "--top-p", "2"], "top_p must be above 0 and at most 1"),
    (["-"], "standard input is empty"),
])
def test_what_cannot_be_is_refused_before_anything_is_loaded(words: list[str], said: str) -> None:
    result = spill(*words, text="")
    assert result.exit_code == 2
    assert said in result.output


def test_a_schema_is_obeyed(tmp_path: Path) -> None:
    """A schema is obeyed by the real model; a null model does not choose its tokens."""
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"age": {"type": "integer", "minimum": 10, "maximum": 99}}, '
                      '"required": ["age"], "additionalProperties": false}')
    assert _schema(str(schema)) == _schema(schema.read_text())
    result = CliRunner().invoke(main, ["generate", "Ann is 42 years old. As JSON: ", "--schema", str(schema),
                                       "--max-tokens", "32", "--max-model-len", "512"])
    assert result.exit_code == 0, result.output
    assert set(json.loads(result.stdout)) == {"age"}
