"""An experiment's `eval:`: every arm is evaluated once, the baseline first, and the report shows speed against KL."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from spillover.errors import SpilloverError
from spillover.lab.accuracy import KL, EvalSpec
from spillover.lab.report.data import read_report
from spillover.lab.report.figures import pareto
from spillover.lab.report.tables import accuracy
from spillover.lab.report.write import write_report
from spillover.lab.run import run_experiment
from support.lab.fake_lab import FakeLoad, experiment

ASKED = {"tasks": ["perplexity"]}


class Asked:
    """A substitute for spill eval; `fails`: number of the call that fails."""

    def __init__(self, fails: int | None = None) -> None:
        self.calls: list[str] = []
        self.fails = fails

    def __call__(self, spec: EvalSpec, url: str, reference: str, folder: Path) -> Mapping[str, float]:
        self.calls.append(reference)
        if len(self.calls) == self.fails:
            raise SpilloverError("spill eval failed: no log probabilities")
        return {"perplexity perplexity": 19.0, f"perplexity {KL}": 0.1 * (len(self.calls) - 1)}


def test_every_arm_is_asked_once_and_the_report_shows_it(tmp_path: Path) -> None:
    made, asked = experiment(eval=ASKED, max_blocks=3, baseline="b"), Asked()
    run_experiment(made, tmp_path / "r", FakeLoad().bench(evaluate=asked))
    run_experiment(made, tmp_path / "r", FakeLoad().bench(evaluate=asked))  # resumed: nothing is evaluated again
    assert asked.calls == ["http://fake"] * 2
    report = read_report(tmp_path / "r")
    assert report.arm("b").scores[f"perplexity {KL}"] == 0, "the baseline is asked first"
    figure = pareto(report)
    assert figure is not None
    assert {line.arm for line in figure.panels[0].lines} == {"a", "b"}
    files = write_report(tmp_path / "r")
    assert (tmp_path / "r/plots/pareto.png").is_file()
    assert "Accuracy" in files.markdown.read_text()
    assert "Speed against KL divergence" in files.html.read_text()


def test_an_accuracy_that_cannot_be_had_leaves_the_arm_its_speed(tmp_path: Path) -> None:
    run_experiment(experiment(eval=ASKED, max_blocks=3), tmp_path / "r", FakeLoad().bench(evaluate=Asked(fails=2)))
    report = read_report(tmp_path / "r")
    assert "no log probabilities" in report.arm("b").no_scores
    assert report.shown(report.arm("b"))


def test_an_experiment_that_does_not_ask_has_none(tmp_path: Path) -> None:
    run_experiment(experiment(max_blocks=3), tmp_path / "r", FakeLoad().bench(evaluate=Asked(fails=1)))
    report = read_report(tmp_path / "r")
    assert accuracy(report) is None
    assert pareto(report) is None


def test_eval_without_tasks_is_refused() -> None:
    with pytest.raises(SpilloverError, match="needs tasks of spill eval"):
        experiment(eval={"limit": 3})


def test_the_text_that_ships_is_taken_where_none_is_named() -> None:
    command = EvalSpec(("perplexity", "gsm8k")).command("http://a", "http://b", Path("said"))
    assert next(Path(part.partition("=")[2]) for part in command if part.startswith("perplexity=")).is_file()
    assert command[command.index("--reference") + 1] == "http://b"
