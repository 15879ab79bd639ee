"""Lookup of tasks by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spillover.errors import SpilloverError, did_you_mean
from spillover.eval.divergence import FullReference, Reference, TopReference
from spillover.eval.metrics import Metric
from spillover.eval.tasks import choices, gsm8k, ifeval, perplexity
from spillover.eval.tasks.base import Task

_READERS: dict[str, Callable[[str, Path, str | None], Task]] = {
    "hellaswag": choices.hellaswag,
    "arc-easy": choices.arc,
    "arc-challenge": choices.arc,
    "mmlu": choices.mmlu,
    "gsm8k": gsm8k.gsm8k,
    "gsm8k-chat": gsm8k.gsm8k,
    "ifeval": ifeval.ifeval,
}
NAMES = ("perplexity", *_READERS)
_METRICS = {
    "hellaswag": (choices.ACC, choices.ACC_NORM),
    "arc-easy": (choices.ACC, choices.ACC_NORM),
    "arc-challenge": (choices.ACC, choices.ACC_NORM),
    "mmlu": (choices.ACC,),
    "gsm8k": gsm8k.Gsm8k.metrics,
    "gsm8k-chat": gsm8k.Gsm8k.metrics,
    "ifeval": ifeval.IFEval.metrics,
}


def metrics_of(name: str, settings: Mapping[str, Any]) -> tuple[Metric, ...]:
    """Return the metrics of a task in a results file."""
    if name == "perplexity":
        references = (FullReference, TopReference)
        more = next((each.metrics for each in references if each.kind == settings.get("divergence")), ())
        return (*perplexity.METRICS, *more)
    if name not in _METRICS:
        raise SpilloverError(f"the results have a task '{name}', which this version does not know")
    return _METRICS[name]


def open_task(given: str, folder: Path, window: int, stride: int, reference: Reference | None) -> Task:
    """Open a task given as NAME or NAME=FILE, and read its data."""
    name, _, file = given.partition("=")
    if name == "perplexity":
        return perplexity.perplexity(name, folder, file or None, window, stride, reference)
    if name not in _READERS:
        raise SpilloverError(f"there is no task '{name}'{did_you_mean(name, NAMES, listed=True)}")
    return _READERS[name](name, folder, file or None)
