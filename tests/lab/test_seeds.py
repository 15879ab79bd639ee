"""The included experiments run as written: arms that exist, flags that engines know, loads that work."""

from __future__ import annotations

import shlex
from types import SimpleNamespace

import pytest

from spillover.cli.bench.bench_serve import serve as serve_load
from spillover.cli.serve import serve
from spillover.lab.document import read_document, shipped
from spillover.lab.experiment import Experiment, load_experiment
from spillover.lab.report.data import Workload
from spillover.lab.report.wording import load_command
from spillover.lab.run_metrics import metric_names
from spillover.lab.traffic import ServedLoad

SIZES = [(name, scale) for name in shipped() for scale in (None, *(read_document(name).get("scales") or {}))]


@pytest.mark.parametrize(("name", "scale"), SIZES, ids=lambda value: str(value or "cpu"))
def test_it_can_be_run_as_it_is_written(name: str, scale: str | None) -> None:
    experiment = load_experiment(name, scale)
    load = ServedLoad(experiment)
    for workload in experiment.workloads:
        load.check(workload)
        assert workload.about, f"{workload.name} says nothing of itself"
    assert experiment.name == name
    assert experiment.about.endswith((".", "?"))
    assert set(experiment.metrics) <= set(metric_names(experiment.slo))
    assert experiment.max_blocks >= experiment.minimum_blocks
    assert all(arm.about for arm in experiment.arms)


@pytest.mark.parametrize(("name", "scale"), SIZES, ids=lambda value: str(value or "cpu"))
def test_spillover_knows_every_flag(name: str, scale: str | None) -> None:
    known = {option.removeprefix("--") for parameter in serve.params for option in parameter.opts}
    for arm in load_experiment(name, scale).arms:
        if arm.spec.kind in ("spillover", "in-process"):
            assert set(arm.spec.args) <= known, arm.name


@pytest.mark.parametrize(("name", "scale"), SIZES, ids=lambda value: str(value or "cpu"))
def test_the_command_that_a_report_shows_for_a_load_is_one_that_can_be_typed(name: str, scale: str | None) -> None:
    experiment = load_experiment(name, scale)
    for made in experiment.workloads:
        workload = Workload(made.name, options=made.options)
        command = shlex.split(load_command(SimpleNamespace(plan={"warmups": experiment.warmups}), workload))
        assert command[:3] == ["spill", "bench", "serve"]
        context = serve_load.make_context("serve", command[3:])
        assert context.params["num_warmups"] == experiment.warmups


def test_every_seed_is_an_experiment_with_a_size_for_a_gpu() -> None:
    seeds = {name: read_document(name) for name in shipped() if name.startswith("seed-")}
    assert {document["seed"] for document in seeds.values()} == {"000", "001", "002", "003", "004"}
    assert all("gpu" in document["scales"] for document in seeds.values())


def test_seeds_have_the_arms_that_their_documents_compare() -> None:
    made = {name: load_experiment(name) for name in shipped()}
    emulated = ["uvm-emulated", "uvm-prefetch-emulated"]
    managed = {"uvm", "uvm-prefetch", "uvm-advise"}
    assert arms(made["seed-000"]) == ["offload", "demand", "sequential", *emulated]
    for name in ("seed-000", "seed-002"):  # arms emulated on a CPU are named so, and a GPU emulates nothing
        assert managed < set(arms(load_experiment(name, "gpu")))
        assert not set(emulated) & set(arms(load_experiment(name, "gpu")))
        assert {arm.spec.args.get("weights") for arm in made[name].arms if "emulated" in arm.name} < managed
        assert all("emulated" in arm.name for arm in made[name].arms if arm.spec.args.get("weights") in managed)
    assert len(arms(made["seed-001"])) == len(load_experiment("seed-001", "gpu").arms) == 6
    assert len(made["seed-001"].workloads) == 3
    assert len(load_experiment("seed-001", "gpu").workloads) == 10
    assert len(arms(made["seed-002"])) == 7
    assert [workload.name for workload in made["seed-002"].workloads] == ["pp512", "tg128"]
    assert [workload.name for workload in made["seed-004"].workloads] == ["single-user", "burst", "heavy"]
    week11 = made["seed-003-week11"]
    assert arms(week11) == ["plain", "ngram-1", "ngram-3", "ngram-5", "ngram-7", "ngram", "suffix"]
    assert [workload.sweep for workload in week11.workloads] == [{}, *({"request-rate": rate} for rate in (1, 4, 10))]
    drafting = {f"{engine}draft-{tokens}" for engine in ("", "vllm-") for tokens in (1, 3, 5, 7)}
    assert {"draft", "vllm-ngram", *drafting} < set(arms(load_experiment("seed-003-week11", "gpu")))
    assert arms(made["seed-003-week13"]) == ["one", "three"]
    assert {f"vllm-tp{count}" for count in (1, 2, 4)} < set(arms(load_experiment("seed-003-week13", "gpu")))
    assert made["seed-004"].warmups > 0
    assert made["seed-004-cold"].warmups == 0


def arms(experiment: Experiment) -> list[str]:
    return [arm.name for arm in experiment.arms]
