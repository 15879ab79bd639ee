"""Job files for Slurm, run by bash with fake programs of Slurm and Ray that log their calls."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from spillover.cli.main import main
from spillover.course.slurm import job_file, on_ray
from spillover.course.steps import experiments
from spillover.course.week import load_week
from spillover.errors import SpilloverError
from support.servers.running_server import until

# The fake `srun` runs its arguments, as on the node that it names. The fake head of Ray listens until it is stopped,
# and with it the process that it serves.
PROGRAMS = {
    "scontrol": 'echo "scontrol $*" >> "$CALLS"; printf "localhost\\nnode-2\\nnode-3\\n"',
    "srun": 'echo "srun $*" >> "$CALLS"; while [[ "$1" == --* ]]; do [[ "$1" != --nodelist=* ]] || '
            'export NODE="${1#*=}"; shift; done; exec "$@"',
    "ray": 'echo "ray $* on $NODE" >> "$CALLS"; [ -z "${FAILS:-}" ] || exit 3; '
           'for word in "$@"; do case $word in --port=*) exec python3 -c "import socket, sys, time\n'
           's = socket.create_server((\'\', int(sys.argv[1]))); time.sleep(60)" "${word#*=}";; esac; done; '
           'exec sleep 60',
    "spill": 'for _ in {1..100}; do [ "$(grep -c "^ray" "$CALLS")" -ge "$NODES" ] && break; sleep 0.05; done; '
             'echo "spill $* at ${RAY_ADDRESS:-} with ${#RAY_AUTH_TOKEN}" >> "$CALLS"; exit 7',
}


def run_job(folder: Path, text: str, job: int, nodes: int, **environment: str) -> tuple[int, str, list[str]]:
    """Return a job's status, its output and all logged calls."""
    programs, calls = folder / "programs", folder / "calls"
    programs.mkdir()
    for name, body in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    calls.touch()
    (folder / "job.sbatch").write_text(text)
    command = ["bash", str(folder / "job.sbatch")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={
        **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(calls), "NODES": str(nodes),
        "SLURM_JOB_ID": str(job), "SLURM_JOB_NODELIST": "cluster-[1-3]", "SLURM_CPUS_PER_TASK": "4",
        "SLURM_SUBMIT_DIR": str(folder), "RAY_AUTH_TOKEN": "", **environment})
    return done.returncode, done.stderr, calls.read_text().splitlines()


def free_job() -> tuple[int, int]:
    """Return a job number whose port is free, and the port."""
    job = next(job for job in range(4_001, 4_100) if not taken(20_000 + job))
    return job, 20_000 + job


def taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_a_job_file_is_bash_and_asks_for_what_the_week_needs(nodes: int) -> None:
    week = load_week(13)
    text = job_file(week, "gpu", "spill course run 13", nodes)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    if shutil.which("shellcheck") is not None:
        subprocess.run(["shellcheck", "-"], input=text, text=True, check=True)
    asked = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert f"--gres=gpu:{-(-week.gpus // nodes)}" in asked
    assert (f"--nodes={nodes}" in asked) == (nodes > 1)
    assert not any(each.startswith("--gres") for each in job_file(week, "cpu", "true", nodes).splitlines())


def test_the_nodes_of_a_job_become_a_cluster_and_leave_with_the_command(tmp_path: Path) -> None:
    job, port = free_job()
    status, said, calls = run_job(tmp_path, job_file(load_week(9), "gpu", "spill course run 9 --ray", 3), job, 3)
    assert status == 7, said  # the status of the command
    assert calls[0] == "scontrol show hostnames cluster-[1-3]"
    started = [call for call in calls if call.startswith("ray ")]
    assert started[0].startswith(f"ray start --head --port={port} --num-cpus=4 ")
    assert started[0].endswith("on localhost")
    assert sorted(call.rpartition(" on ")[2] for call in started[1:]) == ["node-2", "node-3"]
    assert all(call.startswith(f"ray start --address=localhost:{port} ") for call in started[1:])
    assert calls[-1] == f"spill course run 9 --ray at localhost:{port} with 64"
    until(lambda: not taken(port))  # the head was stopped


def test_without_ray_on_the_head_the_job_ends_with_a_sentence(tmp_path: Path) -> None:
    job, _ = free_job()
    status, said, calls = run_job(tmp_path, job_file(load_week(9), "gpu", "spill", 2), job, 2, FAILS="1")
    assert status == 1
    assert "Ray did not start on localhost; is it installed there (pip install 'spillover[ray]')?" in said
    assert not any(call.startswith("spill") for call in calls)


def test_one_node_needs_nothing_of_it(tmp_path: Path) -> None:
    status, said, calls = run_job(tmp_path, job_file(load_week(9), "cpu", "spill course run 9"), 1, 0)
    assert (status, said) == (7, "")
    assert calls == ["spill course run 9 at  with 0"]


def test_replicas_of_a_week_go_to_ray_and_a_week_without_them_is_refused() -> None:
    week = load_week(9)
    made = on_ray(week, experiments(week, "cpu"))
    for experiment in made.values():
        for arm in experiment.arms:
            assert arm.spec.args.get("ray", False) == ("replicas" in arm.spec.args)
    assert any("ray" in arm.spec.args for experiment in made.values() for arm in experiment.arms)
    with pytest.raises(SpilloverError, match="week 5 has no arms with several replicas"):
        on_ray(load_week(5), experiments(load_week(5), "cpu"))


def test_the_command_writes_a_job_of_several_nodes(tmp_path: Path) -> None:
    runner, file = CliRunner(), tmp_path / "job"
    done = runner.invoke(main, ["course", "run", "9", "--scale", "gpu", "--sbatch", str(file), "--nodes", "2"])
    assert done.exit_code == 0, done.output
    assert file.read_text().endswith("spill course run 9 --scale gpu --ray\n")
    for arguments, words in ((["5", "--sbatch", str(file), "--nodes", "2"], "no arms with several replicas"),
                             (["9", "--nodes", "2"], "give --sbatch too")):
        refused = runner.invoke(main, ["course", "run", *arguments])
        assert refused.exit_code == 2
        assert words in refused.output
