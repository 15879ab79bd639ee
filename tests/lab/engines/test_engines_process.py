"""The lab owns an engine's process: it is started, awaited, watched, and stopped with all processes that it started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from spillover.errors import SpilloverError
from spillover.lab.engines import EngineFailed, EngineSpec, Missing
from spillover.lab.engines import process as process_module
from spillover.lab.engines.flags import FlagStyle, to_flags
from spillover.lab.engines.owned import OwnedEngine
from spillover.lab.engines.process import oom_kills, why_it_ended
from support import TESTS
from support.servers.stub_environment import STUB


class StubEngine(OwnedEngine):
    kind = "stub"
    RESET = "/reset_prefix_cache"

    @classmethod
    def installed(cls, spec: EngineSpec) -> Missing | None:
        return None

    def command(self, port: int) -> list[str]:
        return [sys.executable, str(STUB), "--port", str(port), *to_flags(self.spec.args, FlagStyle(repeats=True))]

    def version(self) -> str:
        return str(self.get_json("/version")["version"])


def engine(log_folder: Path | None = None, ready_seconds: float = 30, env: dict[str, str] | None = None, **args: Any
           ) -> StubEngine:
    return StubEngine(EngineSpec("stub", args=args, env=env or {}, ready_seconds=ready_seconds), log_folder)


def gone(pid: int, seconds: float = 10) -> bool:
    return eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE,
                      seconds)


def eventually(true: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if true():
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_an_engine_runs_inside_its_block_and_keeps_its_log(tmp_path: Path) -> None:
    with engine(tmp_path, say=["loading the model"]) as stub:
        running = stub.running
        assert (running.model_name, running.version) == ("stub-model", "1.2.3")
        assert running.pid is not None
        assert psutil.pid_exists(running.pid)
        assert stub.metrics() == {'work_total{who="stub"}': 0.0}
        assert stub.reset_cache().done
        stub.check()
    assert gone(running.pid)
    assert running.log_path is not None
    assert running.log_path.parent == tmp_path
    assert "loading the model" in running.log_path.read_text()
    with pytest.raises(SpilloverError, match="not running"):
        _ = stub.running


def test_each_start_has_a_log_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        with engine(tmp_path):
            pass
    assert len(list(tmp_path.glob("*.log"))) == 2


def test_nothing_that_the_engine_started_outlives_it(tmp_path: Path) -> None:
    """Neither a child in the engine's group nor one with its own group outlives it."""
    children = tmp_path / "children"
    with engine(children=children) as stub:
        pids = json.loads(children.read_text())
        assert {stub.running.pid, *pids} == set(stub.pids())
    assert all(gone(pid) for pid in pids)


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="only Linux has it")
def test_where_memory_runs_out_the_kernel_takes_the_engine_rather_than_the_lab(tmp_path: Path) -> None:
    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    with engine(children=tmp_path / "children") as stub:
        assert {score(pid) for pid in stub.pids()} == {process_module.OOM_SCORE_ADJ}
        assert score(os.getpid()) < process_module.OOM_SCORE_ADJ


def test_an_engine_and_what_it_starts_let_the_client_go_first(tmp_path: Path) -> None:
    with engine(children=tmp_path / "children") as stub:
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in stub.pids()} == {process_module.NICE}
        group = Path(f"/proc/{stub.running.pid}/autogroup")
        assert not group.exists() or group.read_text().endswith(f" nice {process_module.NICE}\n")
    assert os.getpriority(os.PRIO_PROCESS, 0) < process_module.NICE


def test_an_engine_that_will_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "STOP_SECONDS", 0.3)
    with engine(then="stubborn") as stub:
        pid = stub.running.pid
    assert pid is not None
    assert gone(pid)


def test_a_killed_lab_leaves_no_engine_behind(tmp_path: Path) -> None:
    children = tmp_path / "children"
    program = ("import sys, time; sys.path[:0] = sys.argv[2:]\n"
               "from test_engines_process import engine\n"
               "stub = engine(children=sys.argv[1]); stub.start()\n"
               "print(stub.running.pid, flush=True); time.sleep(600)")
    lab = subprocess.Popen([sys.executable, "-c", program, str(children), str(Path(__file__).parent), str(TESTS)],
                           stdout=subprocess.PIPE)
    assert lab.stdout is not None
    server = int(lab.stdout.readline())
    in_group = json.loads(children.read_text())[0]
    lab.kill()
    lab.wait()
    assert gone(server)
    assert gone(in_group)
    os.kill(json.loads(children.read_text())[1], signal.SIGKILL)  # it left the group, and the lab that knew it is dead


def test_an_engine_that_ends_at_its_start_is_a_result_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed) as failed:
        engine(tmp_path, then="exit", status=3, say=["loading", "ValueError: no such architecture"]).start()
    assert failed.value.cause == "no start"
    assert "exited with status 3" in failed.value.reason
    assert "no such architecture" in failed.value.reason
    assert failed.value.log_tail == "loading\nValueError: no such architecture"
    assert failed.value.to_json()["cause"] == "no start"


def test_running_out_of_memory_is_told_apart_from_a_crash() -> None:
    say = ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "RuntimeError: engine died"]
    with pytest.raises(EngineFailed) as failed:
        engine(then="exit", say=say).start()
    assert failed.value.cause == "out of memory"
    assert "Tried to allocate 2.00 GiB" in failed.value.reason


def test_an_engine_that_is_never_healthy_is_given_up(tmp_path: Path) -> None:
    children = tmp_path / "children"
    with pytest.raises(EngineFailed, match=r"not healthy after 5 s"):
        engine(ready_seconds=5, then="hang", children=children).start()
    assert all(gone(pid) for pid in json.loads(children.read_text()))


def test_a_death_in_mid_run_is_noticed() -> None:
    with engine() as stub:
        stub.check()
        stub.post("/die")
        assert gone(stub.pids()[0] if stub.pids() else -1)
        with pytest.raises(EngineFailed, match=r"signal 11 \(SIGSEGV\)") as failed:
            stub.check()
        assert failed.value.cause == "crash"
        assert "core dumped" in failed.value.log_tail


def test_a_server_that_lives_but_is_sick_is_noticed() -> None:
    with engine() as stub:
        stub.post("/sicken")
        with pytest.raises(EngineFailed, match="no longer answers"):
            stub.check()


def test_a_program_that_is_not_there_is_a_result() -> None:
    stub = engine()
    stub.command = lambda port: ["/no/such/program"]  # type: ignore[method-assign]
    with pytest.raises(EngineFailed, match="could not be started") as failed:
        stub.start()
    assert failed.value.cause == "no start"


def test_the_environment_reaches_the_engine() -> None:
    with engine(env={"SOME_SWITCH": "1"}) as stub:
        assert stub.get_json("/environ")["SOME_SWITCH"] == "1"


def test_another_environment_does_not_see_our_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    assert "PYTHONPATH" not in process_module.environment({}, foreign=True)
    assert process_module.environment({"PYTHONPATH": "/theirs"}, foreign=True)["PYTHONPATH"] == "/theirs"
    assert process_module.environment({}, foreign=False)["PYTHONPATH"] == "/ours"


# Output of engines that run out of memory, and of engines with other errors.
OUT_OF_MEMORY = [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of 31.36 GiB",
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 59.02 GiB on device 0: cudaMalloc failed: out of memory",
    "llama_model_load: error loading model: unable to allocate CUDA0 buffer",
    "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory",
]


@pytest.mark.parametrize("line", OUT_OF_MEMORY)
def test_each_engine_s_words_for_no_memory_are_known(line: str) -> None:
    cause, reason = why_it_ended(1, f"INFO starting\n{line}\nINFO shutting down\n", 0)
    assert cause == "out of memory"
    assert line[:60] in reason


@pytest.mark.parametrize(("status", "log", "kills", "cause", "words"), [
    (-9, "INFO ready", 1, "out of memory", "the kernel killed it"),
    (1, "INFO ready", 2, "out of memory", "the kernel killed a process of it"),
    (-9, "INFO ready", None, "out of memory", "as the kernel does"),
    (-9, "INFO ready", 0, "crash", "not by the kernel"),
    (1, "Traceback\nKeyError: 'x'\nbye", 0, "crash", "KeyError: 'x'"),
    (1, "", 0, "crash", "wrote nothing"),
])
def test_why_it_ended(status: int, log: str, kills: int | None, cause: str, words: str) -> None:
    found, reason = why_it_ended(status, log, kills)
    assert found == cause
    assert words in reason


@pytest.mark.parametrize(("line", "file"), [
    ("0::/user/session", "sys/fs/cgroup/user/session/memory.events"),
    ("0::/user/session", "sys/fs/cgroup/memory.events"),
    ("4:memory:/box", "sys/fs/cgroup/memory/box/memory.oom_control"),
])
def test_the_kernel_s_count_is_found_in_either_kind_of_control_group(tmp_path: Path, line: str, file: str) -> None:
    for name, text in (("proc/self/cgroup", f"8:pids:/x\n{line}\n"), (file, "low 0\noom 5\noom_kill 3\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_kills(tmp_path) == 3


def test_no_count_is_not_zero(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) is None


@pytest.mark.parametrize(("args", "style", "words"), [
    ({"cpu-offload-gb": 8, "enforce_eager": True}, FlagStyle(), "--cpu-offload-gb 8 --enforce-eager"),
    ({"enable-prefix-caching": False}, FlagStyle(), "--no-enable-prefix-caching"),
    ({"enable-metrics": False, "tp-size": 2}, FlagStyle(has_negative=False), "--tp-size 2"),
    ({"max-model-len": None}, FlagStyle(), ""),
    ({"disk": ["/a:1GB", "/b:2GB"]}, FlagStyle(repeats=True), "--disk /a:1GB --disk /b:2GB"),
    ({"served-model-name": ["a", "b"]}, FlagStyle(), "--served-model-name a b"),
    ({"ncmoe": 32, "n-cpu-moe": 3, "-lv": 4}, FlagStyle(short=("ncmoe",)), "-ncmoe 32 --n-cpu-moe 3 -lv 4"),
    ({"kv-transfer-config": {"kv_role": "kv_both"}}, FlagStyle(), '--kv-transfer-config {"kv_role":"kv_both"}'),
])
def test_flags_are_written_as_each_program_wants_them(args: dict[str, Any], style: FlagStyle, words: str) -> None:
    assert " ".join(to_flags(args, style)) == words
