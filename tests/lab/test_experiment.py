"""An experiment is parsed strictly, run in ABBA order, resumed where it stopped, and survives the death of an arm."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spillover.bench.records import ClientHealth
from spillover.errors import SpilloverError
from spillover.lab.analysis import analysis_of
from spillover.lab.document import parse_document, read_document, scaled, shipped
from spillover.lab.engines import EngineFailed, Missing
from spillover.lab.experiment import load_experiment, parse_experiment
from spillover.lab.run import run_experiment
from spillover.lab.schedule import turns, visits
from spillover.lab.store import ResultFolder, Results
from spillover.lab.traffic import ServedLoad
from support.lab.fake_lab import FakeEngine, FakeLoad, experiment, make_run

TEXT = """
name: tiers
about: Host memory below a small pool.
baseline: off
arms:
  off: {engine: spillover, args: {num_gpu_blocks_override: 96}}
  host: {engine: spillover, args: {num-gpu-blocks-override: 96, host-memory: 1GB}}
workloads:
  chats: {dataset-name: multi-turn, max-concurrency: 4}
  load: {dataset-name: random, sweep: {request-rate: [1, 2, inf]}, offload: false}
primary: mean_ttft_ms
metrics: [output_throughput, mean_ttft_ms]
slo: {ttft: 500}
max-blocks: 4
scales:
  gpu: {max-blocks: 6, arms: {host: {args: {host-memory: 64GB}}}, slo: null}
"""


def tiers(**changes: Any) -> dict[str, Any]:
    return {**scaled(parse_document(TEXT), None), **changes}


def test_a_document_becomes_arms_and_workloads() -> None:
    made = parse_experiment(tiers())
    assert (made.name, made.baseline, made.primary, made.secondary) == ("tiers", "off", "mean_ttft_ms",
                                                                       ("output_throughput",))
    assert made.arm("off").spec.args == {"num-gpu-blocks-override": 96}
    assert [workload.name for workload in made.workloads] == [
        "chats", "load@request-rate=1", "load@request-rate=2", "load@request-rate=inf"]
    assert made.workload("load@request-rate=2").options == {"dataset-name": "random", "request-rate": 2}
    assert made.workload("load@request-rate=2").group == "load"
    assert (made.passes, made.passes_per_block) == (8, 2)
    assert made.workload("chats").offload  # the arms differ in a tier
    assert not made.workload("load@request-rate=1").offload  # but this workload overrides it
    same = {**tiers(), "arms": {"a": {"engine": "spillover"}, "b": {"engine": "spillover", "args": {"block-size": 32}}}}
    assert not parse_experiment({**same, "baseline": "a"}).workload("chats").offload


def test_sizes_are_laid_over_the_document() -> None:
    made = parse_experiment(scaled(parse_document(TEXT), "gpu"), "gpu")
    assert (made.max_blocks, made.slo, made.scale) == (6, {}, "gpu")
    assert made.arm("host").spec.args == {"num-gpu-blocks-override": 96, "host-memory": "64GB"}
    assert scaled(parse_document(TEXT), "cpu") == scaled(parse_document(TEXT), None)
    with pytest.raises(SpilloverError, match="no size 'tpu'; there are cpu, gpu"):
        scaled(parse_document(TEXT), "tpu")


@pytest.mark.parametrize(("change", "message"), [
    ({"max-block": 3}, r"there is no 'max-block'; did you mean 'max-blocks'\?"),
    ({"repeats": 3}, "there is no 'repeats': an experiment runs until it is decided"),
    ({"equivalence": "little"}, "equivalence is 'little'; give a share such as 2%"),
    ({"equivalence": "nan%"}, "equivalence is nan; give the largest difference"),
    ({"equivalence": -1}, "equivalence is -1; give the largest difference"),
    ({"time-limit": "soon"}, "time-limit is 'soon'; give a time such as 30min"),
    ({"time-limit": 0}, "time-limit is 0 s; give a time"),
    ({"baseline": "hots"}, r"baseline is 'hots'; did you mean 'host'\?"),
    ({"primary": "mean_ttft"}, r"metric is 'mean_ttft'; did you mean"),
    ({"slo": None, "primary": "request_goodput"}, "needs objectives"),
    ({"order": "random"}, "order is 'random'; there are abba, alternate"),
    ({"arms": {"a": {"engine": "vlm"}}, "baseline": "a"}, r"engine is 'vlm'; did you mean 'vllm'\?"),
    ({"arms": {"a": {"args": {}}}, "baseline": "a"}, "needs 'engine'"),
    ({"arms": {"a": {"preset": "no-such"}}, "baseline": "a"}, "There is no preset 'no-such'"),
    ({"arms": {"a": {"engine": "url"}}, "baseline": "a"}, "give its address"),
    ({"arms": {"a b": {"engine": "vllm"}, "a/b": {"engine": "vllm"}}, "baseline": "a b"}, "would share a file"),
    ({"workloads": {}}, "needs 'workloads'"),
    ({"max-blocks": 0}, "at least 1 block"),
    ({"max-blocks": "many"}, "must be a number"),
    ({"minimum-blocks": 1}, "says nothing about chance"),
    ({"confidence": 95}, "give a share"),
    ({"gates": {"drfit": False}}, r"did you mean 'drift'\?"),
    ({"name": "../up"}, "becomes a folder's name"),
])
def test_what_is_misspelt_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpilloverError, match=message):
        parse_experiment(tiers(**change))


def test_a_mapping_may_take_over_the_keys_of_another() -> None:
    document = parse_document("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}")
    assert document == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}
    with pytest.raises(SpilloverError, match="'y' is given twice"):
        parse_document("a: &a {x: 1}\nb: {<<: *a, y: 3, y: 4}")


def test_a_key_that_comes_twice_and_what_is_no_document_are_refused() -> None:
    with pytest.raises(SpilloverError, match="'a' is given twice"):
        parse_document("arms: {a: 1, a: 2}")
    with pytest.raises(SpilloverError, match="must hold names and values"):
        parse_document("- a\n- b")
    with pytest.raises(SpilloverError, match="no experiment 'seed-9999'"):
        read_document("seed-9999")


def arm(**value: Any) -> dict[str, Any]:
    return {"baseline": "a", "arms": {"a": {"engine": "spillover", **value}}}


def load(**value: Any) -> dict[str, Any]:
    return {"workloads": {"w": {"dataset-name": "random", **value}}}


@pytest.mark.parametrize(("change", "message"), [
    (arm(args=["a"]), r"arm 'a': args must hold names and values"),
    (arm(args="a"), r"arm 'a': args must hold"),
    (arm(env=5), r"arm 'a': env must hold"),
    (arm(env={"A": [1]}), r"arm 'a': env: A must be a text or a number"),
    (arm(url=5), r"arm 'a': url must be a text"),
    (arm(python=["python3"]), r"arm 'a': python must be a text"),
    (arm(model={"a": 1}), r"arm 'a': model must be a text"),
    (arm(**{"ready-seconds": math.inf}), r"arm 'a': ready-seconds must be a number"),
    ({"model": 7}, "model must be a text"),
    ({"gates": ["drift"]}, "gates must hold"),
    ({"gates": 5}, "gates must hold"),
    ({"gates": {"drift": math.nan}}, "gate 'drift' takes a limit"),
    ({"slo": 500}, "slo must hold"),
    ({"slo": {"ttft": "fast"}}, "slo: ttft must be a number"),
    ({"slo": {"ttft": [1]}}, "slo: ttft must be a number"),
    ({"metrics": 5}, "metrics must be a list of names"),
    ({"metrics": "mean_ttft_ms"}, "metrics must be a list of names"),
    ({"metrics": [{"a": 1}]}, "metrics must be a list of names"),
    ({"max-blocks": math.inf}, "max-blocks must be a number"),
    ({"max-blocks": math.nan}, "max-blocks must be a number"),
    ({"max-blocks": 10**400}, "max-blocks must be a number"),
    ({"warmups": -1}, "warmups is -1; give 0 or more"),
    ({"retries": -1}, "retries is -1; give 0 or more"),
    (load(sweep=5), "workload 'w': sweep must hold"),
    (load(sweep=[1]), "workload 'w': sweep must hold"),
    (load(sweep={"request-rate": []}), "workload 'w': sweep: request-rate has no values"),
    (load(offload="maybe"), "workload 'w': offload is true or false; got 'maybe'"),
    (load(offload=1), "workload 'w': offload is true or false; got 1"),
])
def test_what_has_another_shape_is_refused_by_its_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpilloverError, match=message):
        parse_experiment(tiers(**change))


@pytest.mark.parametrize(("options", "message"), [
    ({"extra-body": 5}, "workload 'w': extra-body holds names"),
    ({"extra-body": ["a"]}, "workload 'w': extra-body holds names"),
    ({"endpoint": 5}, "workload 'w': endpoint is a text"),
    ({"ignore-eos": "perhaps"}, "workload 'w': ignore-eos is true or false; got 'perhaps'"),
    ({"return-token-ids": 1}, "workload 'w': return-token-ids is true or false; got 1"),
    ({"self-timed": []}, r"workload 'w': self-timed is true or false; got \[\]"),
])
def test_a_load_of_another_shape_is_refused_by_its_name(options: dict[str, Any], message: str) -> None:
    made = parse_experiment(tiers(**load(**options)))
    with pytest.raises(SpilloverError, match=message):
        ServedLoad(made).check(made.workloads[0])


def test_an_arm_may_be_sent_its_requests_in_another_way() -> None:
    text = TEXT.replace("  off: {", "  off: {load: {static_batch_size: 4, max-concurrency: null}, ")
    made = parse_experiment(scaled(parse_document(text), None))
    load = ServedLoad(made)
    own, others = (load._options(made.workload("chats", arm), "http://127.0.0.1:1", None, 0).arrivals
                   for arm in ("off", "host"))
    assert (own.static_batch_size, own.max_concurrency) == (4, None)
    assert (others.static_batch_size, others.max_concurrency) == (None, 4)
    assert made.to_json()["arms"][0]["load"] == {"static-batch-size": 4, "max-concurrency": None}
    assert "load" not in made.to_json()["arms"][1]
    with pytest.raises(SpilloverError, match="arm 'off': load: there is no 'num-prompts'"):
        parse_experiment(scaled(parse_document(text.replace("static_batch_size", "num-prompts")), None))


@pytest.mark.parametrize(("word", "meant"), [
    ("no", False), ("off", False), ("false", False), ("'False'", False), ("No", False),
    ("yes", True), ("on", True), ("true", True), ("ON", True)])
def test_yes_and_no_in_a_workload_mean_what_they_say(word: str, meant: bool) -> None:
    text = TEXT.replace("max-concurrency: 4}", f"max-concurrency: 4, offload: {word}, ignore-eos: {word}, "
                                               f"self-timed: {word}, return-token-ids: {word}}}")
    made = parse_experiment(scaled(parse_document(text), None))
    chats = made.workload("chats")
    sent = ServedLoad(made)._options(chats, "http://127.0.0.1:1", None, seed=0)
    assert (chats.offload, sent.dialect.ignore_eos, sent.dialect.return_token_ids, sent.arrivals.self_timed,
            sent.details["ignore_eos"]) == (meant,) * 5


@pytest.mark.parametrize("text", ["{[a, b]: 1}", "? {a: 1}\n: 2", "arms: {? [a] : 1}", "day: 2024-13-45", "a: [",
                                  "\x07"])
def test_what_yaml_cannot_be_is_one_sentence(text: str) -> None:
    with pytest.raises(SpilloverError, match=r"my\.yaml is not YAML"):
        parse_document(text, "my.yaml")


@pytest.mark.parametrize("scales", ["gpu", ["gpu"], {"gpu": 5}])
def test_sizes_of_another_shape_are_refused(scales: Any) -> None:
    with pytest.raises(SpilloverError, match="scales"):
        scaled({**parse_document(TEXT), "scales": scales}, "gpu")


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiers.yaml"
    path.write_bytes(b"name: caf\xe9")
    with pytest.raises(SpilloverError, match=r"tiers\.yaml cannot be read as UTF-8 text"):
        read_document(str(path))


def test_every_experiment_that_ships_can_be_read_at_every_size() -> None:
    for name, path in shipped().items():
        document = read_document(name)
        for scale in [None, *(document.get("scales") or {})]:
            made = load_experiment(str(path), scale)
            assert made.about, name
            assert len(visits(made)) == made.passes * len(made.arms) * len(made.workloads)
            for workload in made.workloads:
                ServedLoad(made).check(workload)


def test_arms_and_workloads_can_be_picked_and_the_baseline_stays(tmp_path: Path) -> None:
    path = tmp_path / "tiers.yaml"
    path.write_text(TEXT)
    made = load_experiment(str(path), arms=["host"], workloads=["load"], max_blocks=3, model="m")
    assert [arm.name for arm in made.arms] == ["off", "host"]
    assert [workload.group for workload in made.workloads] == ["load"] * 3
    assert (made.max_blocks, made.arms[0].spec.model) == (3, "m")
    with pytest.raises(SpilloverError, match="--arms is 'hosts'"):
        load_experiment(str(path), arms=["hosts"])


@pytest.mark.parametrize("restart", ["per-visit", "never"])
@pytest.mark.parametrize("order", ["abba", "alternate"])
def test_no_arm_stands_earlier_than_another(restart: str, order: str) -> None:
    made = experiment(restart=restart, order=order, max_blocks=4, arms={name: {"engine": "vllm"} for name in "abc"},
                      workloads={name: {"dataset-name": "random"} for name in "wx"})
    planned = visits(made)
    assert Counter((visit.arm, visit.workload) for visit in planned) == {
        (arm, workload): made.passes for arm in "abc" for workload in "wx"}
    assert len({visit.key for visit in planned}) == len(planned)
    means = {(arm, workload): sum(visit.index for visit in planned if (visit.arm, visit.workload) == (arm, workload))
             for arm in "abc" for workload in "wx"}
    assert len(set(means.values())) == 1  # the same mean position: a steady drift cancels
    if order == "abba":
        for block in range(made.max_blocks):
            here = [visit for visit in planned if visit.block == block]
            assert len({sum(visit.index for visit in here if visit.arm == arm) for arm in "abc"}) == 1


def test_a_turn_serves_all_workloads_with_one_start() -> None:
    made = experiment(workloads={name: {"dataset-name": "random"} for name in "wx"}, max_blocks=2)
    taken = turns(visits(made))
    assert all([visit.workload for visit in turn.visits] in (["w", "x"], ["x", "w"]) for turn in taken)
    assert [turn.arm for turn in taken] == ["a", "b", "b", "a"] * 2
    side_by_side = experiment(workloads={name: {"dataset-name": "random"} for name in "wx"}, max_blocks=2,
                              restart="never")
    assert [(visit.workload, visit.arm) for visit in visits(side_by_side)][:4] == [
        ("w", "a"), ("w", "b"), ("x", "a"), ("x", "b")]


def test_servers_are_started_as_often_as_asked_and_all_are_stopped(tmp_path: Path) -> None:
    for restart, starts in (("per-visit", 8 + 1), ("never", 2)):  # both once before the first run; the first is kept
        FakeEngine.started, load = 0, FakeLoad()
        run_experiment(experiment(restart=restart, max_blocks=2), tmp_path / restart, load.bench())
        assert FakeEngine.started == starts
        assert all(engine._running is None for engine in load.engines.values())


def test_all_arms_of_a_pass_get_the_same_prompts_and_no_two_passes_do(tmp_path: Path) -> None:
    load = FakeLoad()
    run_experiment(experiment(max_blocks=2), tmp_path / "r", load.bench())
    assert Counter(repeat for _, _, repeat in load.measured) == dict.fromkeys(range(4), 2)


def test_points_of_a_sweep_do_not_share_prompts() -> None:
    planned = visits(experiment(workloads={"w": {"dataset-name": "random", "sweep": {"request-rate": [1, 2, 4]}}}))
    repeats = {(visit.pass_, visit.workload): visit.repeat for visit in planned}
    assert len(set(repeats.values())) == len(repeats)
    assert all(repeats[visit.pass_, visit.workload] == visit.repeat for visit in planned)


def test_an_interrupted_experiment_goes_on_where_it_stopped(tmp_path: Path) -> None:
    made, whole = experiment(max_blocks=3), FakeLoad(seed=7)
    run_experiment(made, tmp_path / "whole", whole.bench())

    def interrupt(_engine: FakeEngine, repeat: int) -> None:
        if repeat == 3:
            raise KeyboardInterrupt

    first, second = FakeLoad(on_measure=interrupt), FakeLoad()
    with pytest.raises(KeyboardInterrupt):
        run_experiment(made, tmp_path / "cut", first.bench())
    halfway = Results.open(tmp_path / "cut")
    assert len(halfway.visits) == 6
    assert not analysis_of(halfway)["complete"]
    results = run_experiment(made, tmp_path / "cut", second.bench())
    assert len(second.measured) == 6  # completed visits are not repeated
    assert [visit["key"] for visit in results.visits] == [visit.key for visit in visits(made)]
    assert analysis_of(results)["complete"]
    assert len(results.sessions) == 2
    third = FakeLoad()
    run_experiment(made, tmp_path / "cut", third.bench())
    assert third.measured == []


def test_an_interruption_leaves_no_half_written_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = experiment(max_blocks=1)
    folder = ResultFolder.open(tmp_path / "r", made)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        folder.write_visit(visits(made)[0], {"status": "ok"})
    assert not folder.done(visits(made)[0])
    assert [file.name for file in (tmp_path / "r").rglob("*") if file.is_file()] == ["experiment.json"]


def test_another_experiment_does_not_go_into_the_same_folder(tmp_path: Path) -> None:
    run_experiment(experiment(max_blocks=1), tmp_path / "r", FakeLoad().bench())
    with pytest.raises(SpilloverError, match=r"its 'confidence' was 0\.99 and is now 0\.95\. .* --fresh"):
        run_experiment(experiment(max_blocks=1, confidence=0.95), tmp_path / "r", FakeLoad().bench())
    made = experiment(max_blocks=1)
    reworded = replace(made, arms=tuple(replace(arm, about="in other words") for arm in made.arms))
    load = FakeLoad()
    run_experiment(reworded, tmp_path / "r", load.bench())
    assert load.measured == []  # descriptions make no other experiment
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(SpilloverError, match="is not empty"):
        run_experiment(experiment(max_blocks=1), tmp_path / "full", FakeLoad().bench())
    with pytest.raises(SpilloverError, match="holds no results"):
        Results.open(tmp_path / "full")


def test_what_was_measured_is_read_back_whole(tmp_path: Path) -> None:
    results = run_experiment(experiment(max_blocks=1), tmp_path / "r", FakeLoad().bench())
    visit = results.visits[0]
    run = results.run(visit)
    assert run is not None
    assert len(run.records) == 12
    assert run.records[0].chunks[0][0] == pytest.approx(visit["metrics"]["median_ttft_ms"] / 1e3, rel=0.5)
    again = Results.open(tmp_path / "r")
    assert analysis_of(again) == json.loads((tmp_path / "r" / "analysis.json").read_text())


def test_running_out_of_memory_is_a_result(tmp_path: Path) -> None:
    made = experiment(max_blocks=4, arms={"a": {"engine": "spillover"},
                                       "big": {"engine": "spillover", "args": {"fails": "start"}},
                                       "c": {"engine": "spillover", "args": {"slowdown": 1.5}}})
    FakeEngine.started = 0
    results = run_experiment(made, tmp_path / "r", FakeLoad().bench())
    assert FakeEngine.started == 2 * 8 + 1 + 1  # c once more before the first run; big only then
    cells = {cell["arm"]: cell for cell in analysis_of(results)["cells"]}
    assert (cells["big"]["status"], cells["big"]["valid"]) == ("failed", False)
    assert "out of memory: asked for 90 GB of 80" in cells["big"]["reason"]
    assert results.arms["big"]["log_tail"] == "torch.OutOfMemoryError"
    verdicts = {(verdict["arm"], verdict["primary"]): verdict for verdict in analysis_of(results)["verdicts"]}
    assert verdicts["big", True]["verdict"] == "no verdict"
    assert "out of memory" in verdicts["big", True]["why"]
    assert verdicts["c", True]["verdict"] == "slower"  # the other arms are judged nevertheless


def test_a_crash_during_a_run_keeps_what_was_measured(tmp_path: Path) -> None:
    def crash(engine: FakeEngine, repeat: int) -> None:
        if engine.spec.args.get("slowdown") and repeat == 2:
            engine.dead = EngineFailed("crash", "exit status 139", "Segmentation fault")

    made = experiment(max_blocks=2, restart="never", arms={
        "a": {"engine": "spillover"}, "b": {"engine": "spillover", "args": {"slowdown": 1.5}}})
    results = run_experiment(made, tmp_path / "r", FakeLoad(on_measure=crash).bench())
    failed = [visit for visit in results.visits if visit["status"] == "failed"]
    assert [(visit["pass"], visit["arm"], visit["log_tail"]) for visit in failed] == [(2, "b", "Segmentation fault")]
    run = results.run(failed[0])
    assert run is not None
    assert len(run.records) == 12
    assert results.visits[-1]["status"] == "ok"  # restarted for its next turn


def test_a_workload_that_an_arm_cannot_take_ends_that_arm_only(tmp_path: Path) -> None:
    def refuse(engine: FakeEngine, _repeat: int) -> None:
        if engine.spec.args.get("slowdown"):
            raise SpilloverError("the prompt has 9000 tokens and the model takes 8192")

    made = experiment(max_blocks=2, arms={"a": {"engine": "spillover"},
                                       "b": {"engine": "spillover", "args": {"slowdown": 2}}})
    results = run_experiment(made, tmp_path / "r", FakeLoad(on_measure=refuse).bench())
    assert {visit["status"] for visit in results.visits if visit["arm"] == "a"} == {"ok"}
    assert "takes 8192" in next(cell["reason"] for cell in analysis_of(results)["cells"] if cell["arm"] == "b")


def test_a_run_that_a_busy_moment_disturbed_is_run_again_with_other_prompts(tmp_path: Path) -> None:
    load = FakeLoad()
    measure, busy = load.measure, [True, False]

    def once_busy(*arguments: Any) -> Any:
        found = measure(*arguments)
        if busy and busy.pop(0):
            found = replace(found, run=replace(found.run, client=ClientHealth(saturated="sent 80 ms late")))
        return found

    load.measure = once_busy  # type: ignore[method-assign]
    results = run_experiment(experiment(max_blocks=3), tmp_path / "r", load.bench())
    assert len(load.measured) == 13
    first = results.visits[0]
    assert (first["faults"], [fault["gate"] for fault in first["retried_faults"]]) == ([], ["client-saturated"])
    repeats = [repeat for _, _, repeat in load.measured]
    assert (repeats[0], repeats[1], first["repeat"]) == (0, 1_000_000, 1_000_000)  # beyond those of all passes
    busy[:] = [True] * 100
    invalid = analysis_of(run_experiment(experiment(max_blocks=3), tmp_path / "always", load.bench()))
    assert {verdict["verdict"] for verdict in invalid["verdicts"]} == {"no verdict"}


def test_an_engine_that_is_not_installed_is_skipped_with_the_command(tmp_path: Path) -> None:
    made = experiment(max_blocks=1, arms={"a": {"engine": "spillover"}, "v": {"engine": "vllm"}})
    missing = Missing("vLLM is not installed", "pip install vllm")
    bench = FakeLoad().bench(missing=lambda spec: missing if spec.kind == "vllm" else None)
    results = run_experiment(made, tmp_path / "r", bench)
    assert results.arms["v"]["install"] == "pip install vllm"
    cell = next(cell for cell in analysis_of(results)["cells"] if cell["arm"] == "v")
    assert (cell["status"], cell["reason"]) == ("skipped", "vLLM is not installed")
    assert analysis_of(results)["complete"]  # there is nothing left to run
    run_experiment(made, tmp_path / "r", FakeLoad().bench())  # vllm is available now
    assert len(Results.open(tmp_path / "r").visits) == 4


def test_numbers_of_no_real_model_carry_a_label() -> None:
    made = experiment(arms={"a": {"engine": "spillover", "args": {"load-format": "dummy"}}})
    assert made.to_json()["arms"][0]["label"] == "random weights"


def test_a_crash_on_one_workload_leaves_the_others_their_runs(tmp_path: Path) -> None:
    load = FakeLoad()

    def crash(engine: FakeEngine, _repeat: int) -> None:
        if load.measured[-1][0] == "w" and engine.spec.args.get("slowdown"):
            engine.dead = EngineFailed("crash", "exit status 139")

    load._on_measure = crash
    made = experiment(max_blocks=2, workloads={name: {"dataset-name": "random"} for name in "wx"}, arms={
        "a": {"engine": "spillover"}, "b": {"engine": "spillover", "args": {"slowdown": 1.5}}})
    results = run_experiment(made, tmp_path / "r", load.bench())
    statuses = {(cell["workload"], cell["arm"]): cell["status"] for cell in analysis_of(results)["cells"]}
    assert statuses == {("w", "a"): "ok", ("x", "a"): "ok", ("w", "b"): "failed", ("x", "b"): "ok"}
    assert len([visit for visit in results.visits if visit["status"] == "failed" and visit["run"]]) == 2  # then no more


def test_a_run_without_warm_up_is_not_made_warm_by_running_it_again(tmp_path: Path) -> None:
    load = FakeLoad()
    analysis = analysis_of(run_experiment(experiment(max_blocks=3, warmups=0), tmp_path / "r", load.bench()))
    assert len(load.measured) == 12
    assert all("had not answered any request before" in verdict["why"] for verdict in analysis["verdicts"])


@pytest.mark.parametrize("spoil", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"no gzip",
                                   lambda data: data[:20] + bytes(20) + data[40:], lambda data: gzip.compress(b"[1]"),
                                   lambda data: gzip.compress(b"{"), None])
def test_a_run_that_cannot_be_read_is_named(tmp_path: Path, spoil: Callable[[bytes], bytes] | None) -> None:
    made = experiment(max_blocks=1)
    visit = visits(made)[0]
    ResultFolder.open(tmp_path, made).write_visit(visit, {}, make_run())
    results = Results.open(tmp_path)
    raw = tmp_path / results.visits[0]["run"]
    assert results.run(results.visits[0]) == make_run()
    if spoil is None:
        raw.unlink()
    else:
        raw.write_bytes(spoil(raw.read_bytes()))
    with pytest.raises(SpilloverError, match=rf"{visit.key}\.json\.gz cannot be read"):
        results.run(results.visits[0])
