"""The steps of a week, prepared to run: experiments for the lab by size and engine, and command lines."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spillover.course.random_tokenizer import random_tokenizer
from spillover.course.week import CommandStep, ExperimentStep, Week, all_weeks
from spillover.errors import SpilloverError
from spillover.lab.document import read_document, scaled
from spillover.lab.engines import missing
from spillover.lab.engines.shapes import model_path
from spillover.lab.experiment import Experiment, parse_experiment

PRESETS = {("vllm", "cpu"): "vllm-cpu", ("vllm", "gpu"): "vllm-default", ("sglang", "gpu"): "sglang-default",
           ("sglang", "cpu"): "sglang-default"}
GPU_MODEL = "meta-llama/Llama-3.1-8B-Instruct"  # model of commands at the GPU size; experiments name theirs
SHAPES = {GPU_MODEL: "llama-3.1-8b"}  # models with a shipped config.json, for random weights of their shape
FILES_OF_TEXT = ("sharegpt", "custom")
TEXT_LENGTHS = {"dataset-name": "random", "random-input-len": 220, "random-output-len": 200}  # about ShareGPT's lengths
DISKS = "spillover-course-"  # name prefix of KV folders that belong to the course


def make_experiment(week: Week, step: ExperimentStep, scale: str, engine: str = "spillover", model: str | None = None,
                    flags: Mapping[str, Any] | None = None, prompts: int | None = None) -> Experiment:
    """Make the experiment of a step. `flags`: override those of every arm that the lab starts. `prompts`: the maximum
    number of requests per run."""
    document = read_document(step.source)
    document = scaled(document, scale if scale in (document.get("scales") or {}) else None)
    document = _over(document, step.changes.get(scale, {}))
    for arm, own in step.engines.get(engine, {}).items():
        if arm not in document["arms"]:
            continue  # an arm that only another size has
        of_arm = {key: value for key, value in document["arms"][arm].items() if key not in ("engine", "preset")}
        args = {**(of_arm.get("args") or {}), **own}
        if "load" in args:
            of_arm["load"] = args.pop("load").get(scale, {})
        document["arms"] = {**document["arms"], arm: {
            **of_arm, "preset": PRESETS[engine, scale], "about": f"{of_arm.get('about', arm)} ({engine})",
            "args": {key: value for key, value in args.items() if value is not None}}}
    if (flags or {}).get("load-format") == "dummy":
        document = _random_weights(document, model)
        model = shape(model)
    if flags:
        document["arms"] = {name: arm if "url" in arm else {**arm, "args": {**(arm.get("args") or {}), **flags}}
                            for name, arm in document["arms"].items()}
    if "gpu-memory" in (flags or {}):
        document["restart"] = "never"  # each server has its own share, so that all can stay up
    if prompts is not None:
        document["workloads"] = {name: _fewer(load, prompts) for name, load in document["workloads"].items()}
    document = _placed(document, week)
    return parse_experiment({**document, "name": f"{week.name}-{step.name}"}, scale, model)


def experiments(week: Week, scale: str, engine: str = "spillover", model: str | None = None,
                flags: Mapping[str, Any] | None = None, prompts: int | None = None) -> dict[str, Experiment]:
    """Make the experiments of a week, by name; refuse an engine that the week does not support or that is missing."""
    if engine not in week.engines:
        others = [str(other.number) for other in all_weeks() if engine in other.engines]
        raise SpilloverError(f"week {week.number} has nothing to run on {engine}; weeks that have: {', '.join(others)}")
    steps = [step for step in week.experiments if scale in step.scales and (engine == "spillover"
                                                                            or engine in step.engines)]
    made = {step.name: make_experiment(week, step, scale, engine, model, flags, prompts) for step in steps}
    specs = [arm.spec for each in made.values() for arm in each.arms if arm.spec.kind == engine]
    absent = [missing(spec) for spec in specs] if engine != "spillover" else []
    if absent and all(why is not None for why in absent):
        assert absent[0] is not None
        raise SpilloverError(f"week {week.number} cannot be run on {engine}: {absent[0].reason}; needed: "
                             f"{absent[0].install}")
    return made


def clear_disks(experiment: Experiment) -> None:
    """Remove what an earlier run of the course left in the disk folders of its arms: a new run has the same prompts and
    would hit them. Folders with other names belong to the user and stay."""
    for arm in experiment.arms:
        disk = arm.spec.args.get("disk")
        for given in [disk] if isinstance(disk, str) else disk or []:
            folder = Path(str(given).rpartition(":")[0])
            if folder.name.startswith(DISKS):
                shutil.rmtree(folder, ignore_errors=True)


def commands(week: Week, scale: str, engine: str = "spillover") -> list[CommandStep]:
    """Return the commands of a week at a size; there are none for other engines."""
    return [step for step in week.commands if scale in step.run and engine == "spillover"]


def arguments(step: CommandStep, scale: str, output: str, model: str | None = None,
              flags: Mapping[str, Any] | None = None, prompts: int | None = None) -> list[str]:
    """Return the arguments after `spill`. `prompts`: the maximum for a command that has --num-prompts."""
    given, flags = shlex.split(step.run[scale]), dict(flags or {})
    model = GPU_MODEL if model is None and scale == "gpu" else model
    if flags.get("load-format") == "dummy" and model is not None and model in SHAPES:
        flags["tokenizer"] = str(random_tokenizer(SHAPES[model]))
        model = shape(model)
    if prompts is not None and "--num-prompts" in given:
        at = given.index("--num-prompts") + 1
        given[at] = str(min(int(given[at]), prompts))
    given += [] if model is None else ["--model", model]
    given += [part for key, value in flags.items() for part in (f"--{key}", str(value))]
    return [*given, "--output-json", output]


def shape(model: str | None) -> str | None:
    """Return the folder of a model's shape, if one ships; other names are returned unchanged."""
    return model_path(f"shape:{SHAPES[model]}") if model in SHAPES else model


def most_seconds(week: Week, scale: str, engine: str = "spillover") -> float:
    """Return the maximum time of a week in seconds according to its limits, without server starts."""
    return (sum(each.time_limit for each in (make_experiment(week, step, scale) for step in week.experiments
                                             if scale in step.scales))
            + sum(step.seconds for step in commands(week, scale, engine)))


def _random_weights(document: dict[str, Any], model: str | None) -> dict[str, Any]:
    """Return a document that needs only this package: models by their shapes, without arms that need other weights, and
    with random tokens in place of missing dataset files."""
    arms = {}
    for name, arm in document["arms"].items():
        own, args = arm.get("model"), arm.get("args") or {}
        drafts = str(args.get("speculative-model") or (args.get("speculative-config") or {}).get("model") or "")
        if drafts or (own is not None and own not in SHAPES and not str(own).startswith("WEEK/")):
            continue
        of = own or model or document.get("model")
        arms[name] = {**arm, **({} if own is None else {"model": shape(own)}),
                      "args": {**args, **({"tokenizer": str(random_tokenizer(SHAPES[of]))} if of in SHAPES else {})}}
    loads = {name: load if load.get("dataset-name") not in FILES_OF_TEXT or Path(load["dataset-path"]).is_file()
             else {**{key: value for key, value in load.items() if key != "dataset-path"}, **TEXT_LENGTHS}
             for name, load in document["workloads"].items()}
    return {**document, "arms": arms, "workloads": loads,
            **({"model": shape(document["model"])} if document.get("model") else {})}


def _fewer(load: Mapping[str, Any], prompts: int) -> dict[str, Any]:
    """Return a load of at most `prompts` requests; sessions count by their turns."""
    found = dict(load)
    if "num-prompts" in found:
        found["num-prompts"] = min(int(found["num-prompts"]), prompts)
    if "multi-turn-num-sessions" in found:
        most = max(1, prompts // int(found.get("multi-turn-num-turns", 1)))
        found["multi-turn-num-sessions"] = min(int(found["multi-turn-num-sessions"]), most)
    return found


def _placed(value: Any, week: Week) -> Any:
    """Return a document with WEEK/ at the start of a path replaced by the folder of the week."""
    if isinstance(value, dict):
        return {key: _placed(item, week) for key, item in value.items()}
    return f"{week.folder}/{value[5:]}" if isinstance(value, str) and value.startswith("WEEK/") else value


def _over(document: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with changes merged over it, as the lab merges a size: null removes a value."""
    return scaled({**document, "scales": {"changed": changes}}, "changed") if changes else document
