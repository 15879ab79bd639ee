"""Every week runs as written, reports the document's whole table, and names files that exist."""

from __future__ import annotations

import json
import random
import re
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import tokenizers

from spillover.cli.main import main
from spillover.cli.serve import serve
from spillover.course.random_tokenizer import random_tokenizer
from spillover.course.slurm import job_file
from spillover.course.steps import arguments, clear_disks, experiments, make_experiment, most_seconds
from spillover.course.summary import table
from spillover.course.week import SCALES, WEEKS, Week, all_weeks, load_week, parse_week
from spillover.errors import SpilloverError
from spillover.lab.experiment import Experiment
from spillover.lab.preflight import foreseen, workload_stats
from spillover.lab.run_metrics import metric_names
from spillover.lab.traffic import ServedLoad
from support.lab.course_rows import ROWS

ROOT = Path(__file__).parent.parent.parent
ALL = all_weeks()
SIZES = [pytest.param(week, step, scale, id=f"{week.number}-{step.name}-{scale}")
         for week in ALL for step in week.experiments for scale in step.scales]
each_week = pytest.mark.parametrize("week", ALL, ids=lambda week: str(week.number))
TOLD_BY_SERVER = re.compile("spec_|ranks_")  # metrics of some arms only


@each_week
def test_the_documents_whole_table_is_there(week: Week) -> None:
    found = {row.name: row.unit for row in week.metrics}
    assert {name: found.get(name) for name in ROWS[week.number]} == ROWS[week.number]
    assert all(row.about for row in week.metrics)
    assert len(week.expect) >= 2
    assert len(week.questions) >= 3
    assert week.next
    assert week.plots


@each_week
def test_every_file_and_command_of_its_page_exists(week: Week) -> None:
    files = re.findall(r"`(src/[\w./]+)`", week.page)
    assert len(files) >= 3
    assert [name for name in files if not (ROOT / name).is_file()] == []
    assert "The course's commands, today" in week.page
    for line in re.findall(r"^spill .*$", week.page, re.MULTILINE):
        words = shlex.split(line.split("#")[0].rstrip("& \\"))[1:]
        command: click.Command = main
        while isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= known, line


@pytest.mark.parametrize(("week", "step", "scale"), SIZES)
def test_its_experiments_can_be_run(week: Week, step: Any, scale: str) -> None:
    known = {option.removeprefix("--") for parameter in serve.params for option in parameter.opts}
    for engine in ("spillover", *step.engines):
        made = make_experiment(week, step, scale, engine)
        load = ServedLoad(made)
        for workload in made.workloads:
            load.check(workload)
        for arm in made.arms:
            assert arm.about
            assert arm.spec.kind != "spillover" or set(arm.spec.args) <= known, arm.name
        if engine != "spillover":
            assert any(arm.spec.kind == engine for arm in made.arms)


@each_week
def test_what_it_reads_is_measured(week: Week) -> None:
    """Every arm, workload, metric and key that a value names exists in the step."""
    for scale in SCALES:
        made = {step.name: make_experiment(week, step, scale) for step in week.experiments if scale in step.scales}
        sides = [side for each in week.expect if scale in each.scales for side in (each.left, each.right)]
        rows = [value for row in week.metrics if scale not in row.absent for value in row.values]
        for value in (*rows, *filter(None, sides)):
            if value.of in made:
                check_value(made[value.of], value, single=any(value is side for side in sides))


def check_value(experiment: Experiment, value: Any, single: bool) -> None:
    arms = [arm.name for arm in experiment.arms if not value.arms or arm.name in value.arms]
    loads = [load.name for load in experiment.workloads
             if not value.workloads or {load.name, load.group} & set(value.workloads)]
    assert arms, value
    assert loads, value
    if value.kind == "metric":
        assert all(name in metric_names() or TOLD_BY_SERVER.match(name) for name in value.names), value
    if single:  # one side of an expectation is one series
        assert len(arms) == 1, value
        assert len(loads) == 1 or value.kind in ("fact", "score"), value


@pytest.mark.parametrize(("week", "step"), [pytest.param(week, step, id=f"{week.number}-{step.name}")
                                            for week in ALL for step in week.commands])
def test_its_commands_can_be_typed(week: Week, step: Any) -> None:
    for scale in step.run:
        words = arguments(step, scale, "out.json", model="some-model", flags={"load-format": "dummy"})
        command: click.Command = main
        while isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        context = command.make_context("spill", words)
        assert context.params["output_json"] == "out.json"


def test_there_are_sixteen_weeks() -> None:
    assert [week.number for week in ALL] == list(ROWS) == list(range(1, WEEKS + 1))
    assert [week.number for week in ALL if "vllm" in week.engines] == [1, 4, 5, 7, 8, 11]


def test_every_file_of_a_week_is_in_the_wheel() -> None:
    package = ROOT / "src" / "spillover"
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["spillover"]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    there = {path for path in (package / "course").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert len(there) > 50
    assert {path for path in there if path.suffix != ".py"} <= packed


def test_all_weeks_together_stay_below_two_hours_on_a_cpu() -> None:
    assert sum(most_seconds(week, "cpu") for week in ALL) < 2 * 3600


@pytest.mark.parametrize(("week", "step"), [pytest.param(week, step, id=f"{week.number}-{step.name}")
                                            for week in ALL for step in week.experiments if "cpu" in step.scales])
def test_nothing_stands_against_a_verdict_at_the_size_for_a_cpu(week: Week, step: Any) -> None:
    made = make_experiment(week, step, "cpu")
    assert made.minimum_blocks >= 4  # intervals from fewer blocks decide nothing
    assert foreseen(made, workload_stats(made)) == []


def test_the_table_in_the_docs_is_that_of_its_file() -> None:
    told = json.loads((ROOT / "benchmarks" / "results" / "course-cpu.json").read_text())
    assert table(told) in (ROOT / "docs" / "course.md").read_text()
    assert {run["week"] for run in told["runs"] if run["engine"] == "spillover"} == set(range(1, WEEKS + 1))


def test_a_job_file_has_the_cards_and_the_time_of_its_week() -> None:
    week = load_week(5)
    text = job_file(week, "gpu", "spill course run 5 --scale gpu")
    assert "#SBATCH --gres=gpu:1" in text
    assert "#SBATCH --time=02:15:00" in text
    assert text.endswith("spill course run 5 --scale gpu\n")
    assert "gres" not in job_file(week, "cpu", "x")


def test_flags_of_a_run_reach_every_arm_and_label_it() -> None:
    made = experiments(load_week(5), "cpu", flags={"load-format": "dummy"})["prefix"]
    assert {arm.label for arm in made.arms} == {"random weights"}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache for all tests of this file: a large tokenizer is written once."""
    return tmp_path_factory.mktemp("cache")


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPILLOVER_CACHE", str(tmp_path / "file"))
    with pytest.raises(SpilloverError, match=r"cannot be written .* point SPILLOVER_CACHE"):
        random_tokenizer("llama-3.1-8b")


def test_random_weights_have_a_text_for_words_of_the_vocabulary(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILLOVER_CACHE", str(kept))
    folder = random_tokenizer("llama-3.1-8b")
    written = (folder / "tokenizer.json").stat().st_mtime_ns
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 128256
    drawn = random.Random(0).sample(range(1000, 128256), 500)
    text = tokenizer.decode(drawn)
    assert all(tokenizer.decode([token]).strip() for token in [*drawn, 128255])
    assert tokenizer.encode(text).ids == drawn  # the text encodes to the same length, as for the next turn of a chat
    assert random_tokenizer("llama-3.1-8b") == folder
    assert (folder / "tokenizer.json").stat().st_mtime_ns == written
    assert {made.name for made in folder.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize("week", [week for week in ALL if week.gpus == 1], ids=lambda week: str(week.number))
def test_with_random_weights_a_week_for_gpus_needs_nothing_but_the_package(week: Week, tmp_path: Path, kept: Path,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a folder without data
    monkeypatch.setenv("SPILLOVER_CACHE", str(kept))
    flags = {"load-format": "dummy", "gpu-memory": "20GB"}
    for made in experiments(week, "gpu", flags=flags, prompts=6).values():
        assert made.restart == "never"
        ours = [arm for arm in made.arms if arm.spec.kind == "spillover"]
        assert ours
        for arm in ours:
            assert arm.label == "random weights"
            assert arm.spec.args["gpu-memory"] == "20GB"
            assert (Path(arm.spec.model or "") / "config.json").is_file()
            assert (Path(arm.spec.args["tokenizer"]) / "tokenizer.json").is_file()
        assert all(found.count <= 6 for found in workload_stats(made).values())
    for step in week.commands:
        words = arguments(step, "gpu", "out.json", flags=flags, prompts=6)
        assert (Path(words[words.index("--model") + 1]) / "config.json").is_file()
        assert "--num-prompts" not in words or int(words[words.index("--num-prompts") + 1]) <= 6


def test_a_new_run_finds_nothing_of_an_earlier_one_on_disk(tmp_path: Path) -> None:
    own, other = tmp_path / "spillover-course-kv", tmp_path / "kv"
    for folder in (own, other):
        folder.mkdir()
    made = experiments(load_week(15), "cpu")["tiers"]
    arms = [replace(arm, spec=replace(arm.spec, args={**arm.spec.args, "disk": disk}))
            for arm in made.arms for disk in (f"{own}:512MB", [f"{other}:512MB"])]
    clear_disks(replace(made, arms=tuple(arms)))
    assert (own.exists(), other.exists()) == (False, True)


def test_an_engine_that_is_not_here_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILLOVER_VLLM_PYTHON", "/nonexistent/python")
    with pytest.raises(SpilloverError, match=r"^week 5 cannot be run on vllm: [^\n]*; needed: pip install"):
        experiments(load_week(5), "cpu", "vllm")
    with pytest.raises(SpilloverError, match=r"week 3 has nothing to run on vllm; weeks that have: 1, 4, 5, 7, 8, 11$"):
        experiments(load_week(3), "cpu", "vllm")


@pytest.mark.parametrize(("change", "told"), [
    ({"metrcs": []}, "there is no 'metrcs'; did you mean 'metrics'"),
    ({"plots": ["Speed"]}, "plots has 'Speed'"),
    ({"expect": [{"says": "x", "left": {"of": "a", "key": "k"}}]}, "either at-least, a ratio, or within"),
    ({"expect": [{"says": "x", "left": {"of": "b", "key": "k"}, "within": 0.1}]}, "there is no 'b' in this week"),
    ({"expect": [{"says": "x", "left": {"of": "a", "metric": "k"}, "within": 0.1}]}, "of a command a key"),
    ({"metrics": [{"name": "x", "about": "y", "unit": "s", "absent": {"cpu": "z"}}]}, "not say why for every size"),
    ({"experiments": {"a": {"lab": "demo"}}}, "the same name"),
    ({"questions": []}, "needs 'questions'"),
])
def test_a_week_that_is_written_wrongly_is_refused_in_a_sentence(change: dict[str, Any], told: str) -> None:
    document = {"title": "t", "phase": "p", "commands": {"a": {"run": "bench latency"}},
                "metrics": [{"name": "x", "about": "y", "unit": "s", "values": [{"of": "a", "key": "k"}]}],
                "expect": [{"says": "x", "left": {"of": "a", "key": "k"}, "at-least": 1}], "questions": ["q"],
                "next": ["n"]}
    parse_week(document, 1, Path("x"))
    with pytest.raises(SpilloverError, match=told):
        parse_week({**document, **change}, 1, Path("x"))
