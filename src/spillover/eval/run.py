"""Runs all items of a task on a target and records each answer as soon as it arrives."""

from __future__ import annotations

from collections.abc import Sequence

from spillover.eval.metrics import Estimate, estimate
from spillover.eval.pool import answers
from spillover.eval.results import Results
from spillover.eval.target import Target
from spillover.eval.tasks.base import Item, Task


def run(task: Task, target: Target, items: Sequence[Item], results: Results, concurrency: int) -> None:
    """Run the items that are not in the results yet."""
    results.begin(task.name, {"model": target.name, **task.settings})
    left = [item for item in items if item.id not in results.items[task.name]]
    pairs = answers(lambda item: task.ask(target, item), left, concurrency, task.name, len(items) - len(left))
    for item, answer in pairs:
        results.add(task.name, item.id, answer.values, answer.detail)


def summary(task: Task, items: Sequence[Item], results: Results) -> list[tuple[str, Estimate]]:
    """Return an estimate of every metric over the items."""
    values = [results.items[task.name][item.id] for item in items]
    return [(metric.name, estimate(metric, values)) for metric in task.metrics]
