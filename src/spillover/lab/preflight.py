"""Checks before the first run: comparisons that a gate will refuse, whatever is measured.

Each fault is a sentence that names its workload or arm, the gate, and what to change. Nothing is started here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from spillover.bench.workloads.make_workload import make_workload
from spillover.bench.workloads.workload_options import WorkloadOptions
from spillover.bench.workloads.workload_stats import WorkloadStats
from spillover.lab.experiment import Arm, Experiment, WorkloadSpec
from spillover.lab.traffic import workload_part
from spillover.lab.validity import few_samples

BLOCK_SIZE = 16  # spillover's default, for arms that set none


def workload_stats(experiment: Experiment) -> dict[str, WorkloadStats]:
    """Return the statistics of one run of each workload, by its name."""
    return {workload.name: make_workload(WorkloadOptions.from_mapping(workload_part(workload.options)), None).stats()
            for workload in experiment.workloads}


def foreseen(experiment: Experiment, stats: Mapping[str, WorkloadStats]) -> list[str]:
    """Return why there will be no verdict, one sentence each; empty if no problem is foreseen."""
    return [*_limits(experiment), *_warmups(experiment),
            *(fault for workload in experiment.workloads for fault in _workload(experiment, workload,
                                                                                stats[workload.name]))]


def sending_seconds(workload: WorkloadSpec, stats: WorkloadStats) -> float | None:
    """Return the least time of one run in seconds if requests come at a rate; None if the server sets the pace."""
    longest = _number(workload.options.get("max-seconds"))
    rate = _number(workload.options.get("request-rate"))
    seconds = stats.duration if stats.duration is not None else stats.count / rate if rate else None
    return seconds if longest is None else longest if seconds is None else min(seconds, longest)


def _limits(experiment: Experiment) -> Iterator[str]:
    comparisons = (len(experiment.arms) - 1) * len(experiment.workloads)
    least = experiment.rule.least_blocks(comparisons)
    if comparisons and experiment.max_blocks < least:
        yield (f"max-blocks is {experiment.max_blocks}, and {comparisons} comparison{'s' * (comparisons != 1)} at "
               f"{experiment.confidence:.4g} confidence take at least {least} blocks")


def _warmups(experiment: Experiment) -> Iterator[str]:
    if not experiment.warmups and experiment.gates.limit("cold-start") is not None:
        yield "warmups is 0, and the gate cold-start rejects runs on a server that has not answered any request"


def _workload(experiment: Experiment, workload: WorkloadSpec, stats: WorkloadStats) -> Iterator[str]:
    least = experiment.gates.limit("samples")
    if least is not None:
        gaps = stats.output.total - stats.count
        for fault in few_samples(experiment.metrics, stats.count, gaps, least):
            yield (f"workload '{workload.name}', gate samples: {fault.reason}; raise num-prompts, or compare a mean")
    for arm in experiment.arms:
        yield from _arm(experiment, workload, stats, arm)


def _arm(experiment: Experiment, workload: WorkloadSpec, stats: WorkloadStats, arm: Arm) -> Iterator[str]:
    if stats.estimated:  # lengths are not those of the model's tokenizer
        return
    longest = arm.spec.args.get("max-model-len")
    if isinstance(longest, int) and stats.prompt.max >= longest:
        yield (f"workload '{workload.name}', arm '{arm.name}': prompts have up to {stats.prompt.max:,} tokens, and "
               f"max-model-len is {longest:,}")
    limit, blocks = experiment.gates.limit("offload"), arm.spec.args.get("num-gpu-blocks-override")
    known = arm.spec.kind in ("spillover", "in-process", "vllm")
    if workload.offload and limit is not None and known and isinstance(blocks, int):
        pool = blocks * int(arm.spec.args.get("block-size", BLOCK_SIZE))
        if stats.working_set_tokens <= limit * pool:
            yield (f"workload '{workload.name}', arm '{arm.name}', gate offload: the working set is "
                   f"{stats.working_set_tokens:,} tokens and the device holds {pool:,}, so that nothing has to be "
                   "offloaded; raise the load or lower num-gpu-blocks-override")


def _number(value: object) -> float | None:
    """Return a finite positive number, None if there is none."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if 0 < number < float("inf") else None
