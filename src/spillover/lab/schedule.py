"""The order in which arms take turns, chosen so that drift of the machine's speed does not favour an arm.

A pass visits every arm on every workload once; every second pass is in reverse order. Under `abba` a forward and a
backward pass make one block, in which every arm is equally early and late: a steady drift cancels inside each block.
Under `alternate` every pass is a block: as many blocks in half the time, but drift widens the interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from spillover.lab.experiment import Experiment, file_part


@dataclass(frozen=True)
class Visit:
    """One run of one arm on one workload."""

    index: int  # in the order of running
    pass_: int
    block: int
    workload: str
    arm: str
    repeat: int  # number of the prompts: the same for all arms of a pass, and unique otherwise

    @property
    def key(self) -> str:
        return f"p{self.pass_:03d}-{file_part(self.workload)}-{file_part(self.arm)}"


@dataclass(frozen=True)
class Turn:
    """Consecutive visits that are served by one start of a server."""

    arm: str
    visits: tuple[Visit, ...]

    @property
    def log_name(self) -> str:
        return f"{file_part(self.arm)}-p{self.visits[0].pass_:03d}"


def visits(experiment: Experiment) -> tuple[Visit, ...]:
    """Return all visits that may be run, up to the experiment's limit of blocks."""
    planned: list[Visit] = []
    # Points of a sweep are the same workload: with the same repeat, they would hit each other's prompts in the cache.
    places = {workload.name: place for place, workload in enumerate(experiment.workloads)}
    for pass_ in range(experiment.passes):
        order = _forward(experiment)
        for workload, arm in reversed(order) if pass_ % 2 else order:
            planned.append(Visit(len(planned), pass_, pass_ // experiment.passes_per_block, workload, arm,
                                 pass_ * len(places) + places[workload]))
    return tuple(planned)


def turns(planned: Sequence[Visit]) -> list[Turn]:
    """Group consecutive visits of the same arm and pass. With servers that stay up, turns find them running."""
    grouped = groupby(planned, key=lambda visit: (visit.pass_, visit.arm))
    return [Turn(arm, tuple(group)) for (_pass, arm), group in grouped]


def _forward(experiment: Experiment) -> list[tuple[str, str]]:
    """Order turns. Where servers stay up, arms alternate on each workload, so that compared runs are close in time.
    Where each turn starts a server, it serves all workloads before it stops."""
    arms, workloads = ([each.name for each in many] for many in (experiment.arms, experiment.workloads))
    if experiment.restart == "never":
        return [(workload, arm) for workload in workloads for arm in arms]
    return [(workload, arm) for arm in arms for workload in workloads]
