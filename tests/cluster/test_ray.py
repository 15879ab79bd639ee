"""`spill serve --ray` and a deployment of Ray Serve, with Ray itself on this machine (`make test-cluster`)."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from spillover.course.slurm import job_file
from spillover.course.week import load_week
from spillover.server.listen import listen
from support.servers.running_server import SPILL, Server, running, until

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-cluster does it")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

# A prefill token takes 1 ms: a prompt of 400 tokens keeps a replica busy for 0.4 s.
NULL = ("--load-format", "null", "--simulate-step", "10,1", "--max-model-len", "1024", "--max-num-seqs", "8",
        "--no-log-requests")
ON_RAY = ("--ray", "--ray-resources", '{"CPU": 0.25}')


def replicas(server: Server) -> list[dict[str, Any]]:
    return list(httpx.get(f"{server.url}/replicas", timeout=10).json()["replicas"])


def ready(server: Server) -> int:
    return sum(each["ready"] for each in replicas(server))


def server_process(family: list[psutil.Process], url: str) -> psutil.Process:
    """Return the process of the replica at `url`."""
    port = int(url.rpartition(":")[2])
    return next(each for each in family if "spillover.server.replica" in " ".join(_arguments(each)) and any(
        found.status == psutil.CONN_LISTEN and found.laddr.port == port for found in each.net_connections()))


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def nothing_is_left_of(family: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive, [_arguments(each) for each in alive]


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


class Load:
    """Clients that send requests without a pause, half of them streamed; and the outcome of every request."""

    def __init__(self, url: str, clients: int) -> None:
        self.outcomes: list[str] = []
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(place,)) for place in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, client: int) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as http:
            turn = 0
            while not self._over.is_set():
                turn += 1
                body = {"prompt": [client + 1, turn % 1000, *range(2, 400)], "max_tokens": 8, "ignore_eos": True,
                        "stream": bool(client % 2)}
                reply = http.post("/v1/completions", json=body)
                if reply.status_code != 200:
                    self.outcomes.append(f"{reply.status_code}: {reply.text}")
                elif "replica_lost" in reply.text:
                    self.outcomes.append("broken stream")
                else:
                    self.outcomes.append("whole")


def test_two_replicas_are_loaded_killed_scaled_to_three_and_back_and_nothing_is_left() -> None:
    with running(*NULL, *ON_RAY, "--min-replicas", "2", "--max-replicas", "3", "--target-backlog-seconds", "1",
                 "--scale-down-seconds", "4") as server:
        assert "by 2 to 3 replicas on Ray" in server.log()
        until(lambda: [each["index_state"] for each in replicas(server)[:2]] == ["exact"] * 2, 30)
        with Load(server.url, 3) as load:
            _kill_and_heal(server, load, 0, _kill_server)
            _kill_and_heal(server, load, 1, _kill_actor)
        assert set(load.outcomes) <= {"whole", "broken stream"}, set(load.outcomes)
        assert load.outcomes.count("broken stream") <= 2  # answers that had begun when a replica was killed
        with Load(server.url, 16) as load:
            until(lambda: ready(server) == 3, 120)
            before = len(load.outcomes)
            until(lambda: len(load.outcomes) > before + 16, 60)
        assert set(load.outcomes) == {"whole"}
        until(lambda: ready(server) == 2, 60)
        assert server.metrics()["spillover:router_target_replicas"] == 2
        family = descendants(server.process.pid)
        until(lambda: sum("spillover.server.replica" in " ".join(_arguments(each))
                          for each in descendants(server.process.pid)) == 2, 30)
    nothing_is_left_of(family)


def _kill_and_heal(server: Server, load: Load, victim: int, kill: Callable[[list[psutil.Process], str], None]) -> None:
    """Kill a process of a busy replica, and wait until it serves again."""
    before, old = len(load.outcomes), replicas(server)[victim]["url"]
    until(lambda: len(load.outcomes) > before + 6, 60)
    kill(descendants(server.process.pid), old)
    until(lambda: not replicas(server)[victim]["ready"], 10)
    until(lambda: replicas(server)[victim]["ready"] and replicas(server)[victim]["url"] != old, 90)


def _kill_server(family: list[psutil.Process], url: str) -> None:
    server_process(family, url).kill()


def _kill_actor(family: list[psutil.Process], url: str) -> None:
    actor = server_process(family, url).parent()
    assert actor is not None
    assert "ReplicaActor" in actor.cmdline()[0]
    actor.kill()


def test_a_killed_router_takes_all_with_it_and_without_room_there_is_a_sentence() -> None:
    with running(*NULL, *ON_RAY) as server:
        family = [each for each in descendants(server.process.pid)  # Ray's own agents take a minute to notice
                  if "spillover" in " ".join(_arguments(each)) or "ReplicaActor" in " ".join(_arguments(each))]
        assert len(family) >= 3  # the actor, the front, the engine
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(10)
        server.process.returncode = 0  # its death was intended
    nothing_is_left_of(family)
    told = subprocess.run([*SPILL, "serve", "--port", "0", *NULL, "--ray", "--ray-resources", '{"CPU": 0.25, "TPU": 8}',
                           "--ray-placement-seconds", "3"], capture_output=True, text=True, timeout=120, check=False)
    assert told.returncode == 2
    assert ("replica 0 cannot start: no machine of the Ray cluster had 0.25 CPU, 8 TPU free within 3 s"
            in told.stderr), told.stderr
    assert "Traceback" not in told.stderr


@contextlib.contextmanager
def cluster() -> Iterator[list[psutil.Process]]:
    """Start a cluster on this machine; yield a list that finally receives its processes."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True)
    family: list[psutil.Process] = []
    try:
        yield family
        family += descendants(os.getpid())
    finally:
        ray.shutdown()


def test_a_deployment_of_ray_serve_redirects_to_the_router_and_starts_it_again() -> None:
    from ray import serve

    file = Path(__file__).resolve().parents[2] / "deploy" / "ray" / "serve_app.py"
    spec = importlib.util.spec_from_file_location("serve_app", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with listen("127.0.0.1", 0) as one, listen("127.0.0.1", 0) as other:
        port, proxy = one.getsockname()[1], other.getsockname()[1]
    with cluster() as family:
        serve.start(http_options={"port": proxy})
        flags = " ".join((*NULL, "--replicas", "1", "--ray-resources", "'" + json.dumps({"CPU": 0.25}) + "'"))
        serve.run(module.app({"flags": flags, "port": str(port)}))
        address = f"http://127.0.0.1:{proxy}"
        sent = httpx.post(f"{address}/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 2}, timeout=60)
        assert sent.status_code == 307
        assert sent.headers["location"].endswith(f":{port}/v1/completions")
        _answers(address)
        (router,) = [each for each in descendants(os.getpid()) if "end_with_parent" in " ".join(_arguments(each))]
        router.kill()
        until(lambda: not router.is_running() or router.status() == psutil.STATUS_ZOMBIE, 10)
        _eventually(lambda: _answers(address), 120)
        family += descendants(os.getpid())
        serve.shutdown()
    nothing_is_left_of(family)


def test_the_nodes_of_a_slurm_job_become_a_cluster_and_nothing_is_left(tmp_path: Path) -> None:
    """Both nodes are this machine: a fake `srun` runs its arguments."""
    for name, body in (("scontrol", f"printf '{socket.gethostname()}\\n{socket.gethostname()}\\n'"),
                       ("srun", 'while [[ "$1" == --* ]]; do shift; done; exec "$@"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "count.py").write_text(
        "import time\nfrom spillover.cluster.owned.ray_server import connect\nray = connect(None, 120.0)\n"
        "while len(nodes := ray.nodes()) < 2: time.sleep(0.2)\n"
        "print(len(nodes), 'nodes with', ray.cluster_resources()['CPU'], 'cores')\n")
    (tmp_path / "job").write_text(job_file(load_week(9), "cpu", f"{sys.executable} count.py", 2))
    port = next(port for port in range(24_001, 24_100) if _is_free(port))
    job = subprocess.Popen(["bash", tmp_path / "job"], stdout=subprocess.PIPE, text=True, env={
        **os.environ, "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(port - 20_000), "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "3",
        "SLURM_SUBMIT_DIR": str(tmp_path)})
    family: dict[int, psutil.Process] = {}
    deadline = time.monotonic() + 200
    while job.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):
            family |= {each.pid: each for each in descendants(job.pid)}
        time.sleep(0.2)
    assert job.stdout is not None
    told = job.stdout.read()
    assert job.returncode == 0, told
    assert "2 nodes with 6.0 cores" in told
    nothing_is_left_of(list(family.values()))
    shutil.rmtree(f"/tmp/ray-{port - 20_000}", ignore_errors=True)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) != 0


def _answers(address: str) -> None:
    reply = httpx.post(f"{address}/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 2, "stream": True},
                       timeout=60, follow_redirects=True)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-spillover-replica"] == "replica-0"
    assert reply.text.rstrip().endswith("data: [DONE]")


def _eventually(holds: Callable[[], None], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return holds()
        except (AssertionError, httpx.HTTPError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
