"""A week as a Slurm job, on one node, or on several with the week's replicas on a Ray cluster."""

from __future__ import annotations

import dataclasses
import math

from spillover.course.steps import most_seconds
from spillover.course.week import Week
from spillover.errors import SpilloverError
from spillover.lab.experiment import Experiment

HEADROOM_SECONDS = 900.0  # seconds added to the experiments' time limits, for server starts and loading of weights
MEMORY, CPUS = "64G", 8  # per node

# The batch script runs on the first node. Ports and folders include the job's number, so that jobs can share a node.
_CLUSTER = """\
# A Ray cluster of the job's nodes. The first is its head, and runs the command below.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 10000))
export RAY_ADDRESS="${nodes[0]}:$port"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
cpus=${SLURM_CPUS_PER_TASK:-1}
steps=()
trap 'kill "${steps[@]}" 2> /dev/null || true' EXIT
on_node() { exec srun --nodes=1 --ntasks=1 --cpus-per-task="$cpus" --nodelist="$1" "${@:2}"; }
on_node "${nodes[0]}" ray start --head --port="$port" --num-cpus="$cpus" --temp-dir="/tmp/ray-$SLURM_JOB_ID" \\
    --ray-client-server-port=$((port + 10000)) --include-dashboard=false --disable-usage-stats --block &
steps+=($!)
for ((second = 0; ; second++)); do
    if (: < "/dev/tcp/${nodes[0]}/$port") 2> /dev/null; then break; fi
    if [ "$second" = 120 ] || ! kill -0 "${steps[0]}" 2> /dev/null; then
        echo "Ray did not start on ${nodes[0]}; is it installed there (pip install 'spillover[ray]')?" >&2
        exit 1
    fi
    sleep 1
done
for node in "${nodes[@]:1}"; do
    on_node "$node" ray start --address="$RAY_ADDRESS" --num-cpus="$cpus" --disable-usage-stats --block &
    steps+=($!)
done
"""


def job_file(week: Week, scale: str, command: str, nodes: int = 1) -> str:
    """Return a job file that runs `command`; with several nodes, on the first of them, with a Ray cluster of all."""
    hours, minutes = divmod(math.ceil((most_seconds(week, scale) + HEADROOM_SECONDS) / 60), 60)
    options = [f"--job-name=spill-{week.name}"]
    options += [] if nodes == 1 else [f"--nodes={nodes}", "--ntasks-per-node=1"]
    options += [f"--gres=gpu:{math.ceil(week.gpus / nodes)}"] if scale == "gpu" else []
    options += [f"--time={hours:02}:{minutes:02}:00", f"--mem={MEMORY}", f"--cpus-per-task={CPUS}",
                f"--output={week.name}-%j.log"]
    return "\n".join([
        "#!/bin/bash", *(f"#SBATCH {each}" for each in options), "",
        "# Load your modules and activate your environment here; the same command resumes after an interruption.",
        "set -euo pipefail", 'cd "${SLURM_SUBMIT_DIR:-.}"', *([_CLUSTER] if nodes > 1 else []), command, ""])


def on_ray(week: Week, made: dict[str, Experiment]) -> dict[str, Experiment]:
    """Return a week's experiments with the replicas of their arms on Ray; refuse a week without replicas."""
    changed = {name: dataclasses.replace(experiment, arms=tuple(
        dataclasses.replace(arm, spec=dataclasses.replace(arm.spec, args={**arm.spec.args, "ray": True}))
        if arm.spec.kind == "spillover" and "replicas" in arm.spec.args else arm for arm in experiment.arms))
        for name, experiment in made.items()}
    if changed == made:
        raise SpilloverError(f"week {week.number} has no arms with several replicas, so nothing that several machines "
                             "could run: leave --nodes and --ray out")
    return changed
