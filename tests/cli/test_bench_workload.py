"""`spill bench workload` prints what a workload sends, for the command line's options."""

from __future__ import annotations

import json
from typing import Any

import click
import pytest

from spillover.bench.workloads.workload_options import WorkloadOptions, names
from spillover.cli.bench.workload_options import workload_options
from spillover.cli.main import main


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main.main(["bench", "workload", *args])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--dataset-name", "generated_shared_prefix", "--gsp-num-groups", "4") == 0
    out = capsys.readouterr().out
    assert "generated-shared-prefix: 64 requests" in out
    assert "could serve 88.2% of prompt tokens" in out
    assert "Working set: 32,704 distinct tokens" in out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json", "--num-prompts", "10", "--random_input_len", "64", "--random-prefix-len", "32") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["options"] == {"dataset-name": "random", "num-prompts": 10, "random-input-len": 64,
                               "random-prefix-len": 32}
    assert told["prompt"]["mean"] == 96
    assert told["shared_tokens"] == 9 * 32


@pytest.mark.parametrize(("args", "said"), [
    (["--gsp-num-groups", "4"], "--gsp-num-groups is for"),
    (["--dataset-name", "mooncake"], "needs --dataset-path"),
    (["--num-promts", "4"], "did you mean --num-prompts"),
    (["--max-model-len", "100"], "the model takes 100"),
    (["--base-url", "http://127.0.0.1:9", "--max-model-len", "5"], "leave --max-model-len out"),
])
def test_mistakes_are_answered_in_a_sentence(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*args) == 2
    assert said in capsys.readouterr().err


def test_every_option_is_on_the_command_line_and_none_is_given_by_itself() -> None:
    seen: list[WorkloadOptions] = []

    @click.command()
    @workload_options()
    def command(workload: WorkloadOptions, **_: Any) -> None:
        seen.append(workload)

    assert {param.name for param in command.params} == set(names())
    command.main([], standalone_mode=False)
    command.main(["--dataset-name", "prefix-repetition", "--disable-shuffle", "--num-prompts", "1000"],
                 standalone_mode=False)
    assert seen[0] == WorkloadOptions()
    assert seen[0].given == frozenset()
    assert seen[1].given == {"dataset_name", "disable_shuffle", "num_prompts"}
