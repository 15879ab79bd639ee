"""A server process that the lab owns: its process group, log, health and shutdown.

No process of the group outlives the owner: `stop` sends SIGTERM and then SIGKILL, and a watcher that waits on a pipe
does the same if the lab itself is killed. The reason why a server exited is derived from its exit status, the kernel's
count of processes killed for memory, and its log.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from spillover.bench.serving.server_facts import exchange
from spillover.lab.engines.base import EngineFailed

HOST = "127.0.0.1"
STOP_SECONDS = 30.0
NICE = 10  # niceness of engines under test
OOM_SCORE_ADJ = 500  # from -1000 to 1000; the default is 0
TAIL_BYTES = 256 * 1024  # size of the log's end that is searched for a reason
TAIL_LINES = 40  # number of last log lines that a result keeps
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|std::bad_alloc|\bMemoryError\b"
    r"|[Cc]annot allocate memory|can't allocate memory|No available memory for the cache blocks"
    r"|failed to allocate .*buffer|unable to allocate|larger than the available KV cache memory"
    r"|[Nn]ot enough memory|DefaultCPUAllocator", re.IGNORECASE)
_ERROR = re.compile(r"\b(?:[A-Z]\w*(?:Error|Exception)|error|fatal|failed)\b.*", re.IGNORECASE)
# `read` fails at the end of the pipe, which occurs once the process that holds its other end has exited.
_WATCHER = "read _ || { kill -s TERM -- -$1; sleep 5; kill -s KILL -- -$1; } 2>/dev/null"


class ServerProcess:
    """One start of one server. `healthy(url)` returns whether it is ready to be measured."""

    def __init__(self, name: str, command: Sequence[str], port: int, env: Mapping[str, str],
                 log_folder: Path | None = None, foreign: bool = False) -> None:
        """Describe a server. `foreign`: run by another environment's interpreter, which must not see our paths."""
        self.url = f"http://{HOST}:{port}"
        self.command = tuple(command)
        self.log_path = _log_file(name, log_folder)
        self._name, self._keeps_log = name, log_folder is not None
        self._env = environment(env, foreign)
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._group = 0
        self._oom_kills: int | None = None
        self._failed = False

    def start(self, ready_seconds: float, healthy: Callable[[str], bool]) -> float:
        """Start the server and return the seconds until it was healthy; on failure stop it and raise `EngineFailed`."""
        self._oom_kills = oom_kills()
        begin = time.monotonic()
        try:
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT,
                                                 stdin=subprocess.DEVNULL, start_new_session=True, env=self._env)
        except OSError as error:
            self._failed = True
            raise EngineFailed("no start", f"{self._name} could not be started: {error}") from error
        self._group = self._process.pid
        _prefer_oom_kill(self._group)
        _lower_priority(self._group)
        try:
            self._watcher = subprocess.Popen(["/bin/sh", "-c", _WATCHER, "sh", str(self._group)],
                                             stdin=subprocess.PIPE, start_new_session=True)
            while not healthy(self.url):
                self.check(starting=True)
                if time.monotonic() - begin > ready_seconds:
                    self._failed = True
                    raise EngineFailed("no start", f"{self._name} was not healthy after {ready_seconds:.0f} s",
                                       self.tail())
                time.sleep(0.1)
        except BaseException:
            self.stop()
            raise
        return time.monotonic() - begin

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def check(self, starting: bool = False, patience: float = 0.0) -> None:
        """Raise `EngineFailed` with the reason if the process has exited, or exits within `patience` seconds. If it was
        never healthy, it did not crash but failed to start, for example because it refused its arguments."""
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        if self._process.returncode is None:
            return
        self._failed = True
        kills = oom_kills()
        killed = None if kills is None or self._oom_kills is None else kills - self._oom_kills
        cause, reason = why_it_ended(self._process.returncode, self.log_tail_text(), killed)
        if starting and cause == "crash":
            cause = "no start"
        raise EngineFailed(cause, f"{self._name} {reason}", self.tail())

    def pids(self) -> tuple[int, ...]:
        """Return the processes of its process group, and descendants that moved to another group."""
        if self._process is None:
            return ()
        found = set(group_members(self._group))
        with contextlib.suppress(psutil.Error):
            found.update(child.pid for child in psutil.Process(self._group).children(recursive=True))
        return tuple(sorted(found))

    def log_tail_text(self) -> str:
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def tail(self) -> str:
        """Return the last lines of the log, without text that a progress bar overwrote."""
        lines = [line.rpartition("\r")[2] for line in self.log_tail_text().rstrip().split("\n")]
        return "\n".join(lines[-TAIL_LINES:])

    def stop(self) -> None:
        """Send SIGTERM to the server, then SIGKILL to its remaining processes."""
        if self._process is not None:
            strays = _alive(self.pids())
            if self._process.poll() is None:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_SECONDS)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, signal.SIGKILL)
            for stray in strays:  # processes of other groups; psutil does not signal a pid that has been reused
                with contextlib.suppress(psutil.Error):
                    stray.kill()
            self._process.wait()
            _wait_until_gone(strays)
            self._process = None
        self._dismiss_watcher()
        if not self._keeps_log and not self._failed:
            self.log_path.unlink(missing_ok=True)

    def _dismiss_watcher(self) -> None:
        if self._watcher is not None and self._watcher.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._watcher.stdin.write(b"\n")
                self._watcher.stdin.close()
            self._watcher.wait()
            self._watcher = None


def why_it_ended(status: int, log: str, killed_for_memory: int | None) -> tuple[str, str]:
    """Return (cause, reason) from the exit status, the end of the log and the number of processes that the kernel
    killed for memory since the start (None if unknown)."""
    lines = [line.strip() for line in log.splitlines()]
    killed = status in (-signal.SIGKILL, 128 + signal.SIGKILL)
    ended = (f"was killed by signal {-status} ({_signal_name(-status)})" if status < 0 else
             f"exited with status {status}")
    exhausted = next((line for line in lines if _OUT_OF_MEMORY.search(line)), None)
    if killed_for_memory:
        return "out of memory", f"{ended}: the kernel killed {'it' if killed else 'a process of it'} for its memory"
    if exhausted is not None:
        return "out of memory", f"{ended}: {_short(exhausted)}"
    if killed and killed_for_memory is None:
        return "out of memory", f"{ended}, as the kernel does when memory runs out"
    if killed:
        return "crash", f"{ended}, but not by the kernel for lack of memory"
    last = next((line for line in reversed(lines) if _ERROR.search(line)), lines[-1] if lines else "")
    return "crash", f"{ended}: {_short(last)}" if last else f"{ended} and wrote nothing"


def oom_kills(root: Path = Path("/")) -> int | None:
    """Return how many processes of this control group the kernel killed for memory; None if it does not report it."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):  # version 2 has one unnamed hierarchy
                continue
            folder = root / "sys/fs/cgroup" / controllers
            name = "memory.oom_control" if controllers else "memory.events"
            for file in (folder / path.lstrip("/") / name, folder / name):  # a container sees its own group as the root
                if file.is_file():
                    found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
                    if found is not None:
                        return int(found[1])
    return None


def status_of(url: str, timeout: float = 5.0) -> int:
    """Return the HTTP status of a GET; 0 if no server answers."""
    return exchange(url, seconds=timeout)[0]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def group_members(group: int) -> list[int]:
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == group:
                members.append(pid)
    return members


def environment(extra: Mapping[str, str], foreign: bool) -> dict[str, str]:
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV") if foreign else ()
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {"PYTHONUNBUFFERED": "1"} | {name: str(value) for name, value in extra.items()}


def is_foreign(program: str) -> bool:
    """Return whether a program belongs to another environment; links are not resolved, as venvs link interpreters."""
    return os.path.dirname(os.path.abspath(program)) != os.path.dirname(os.path.abspath(sys.executable))


def _prefer_oom_kill(pid: int) -> None:
    """Make the kernel kill the engine under test when memory runs out, not any other process.

    Child processes inherit it. If it cannot be set, the kernel's default choice applies."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(OOM_SCORE_ADJ))


def _lower_priority(pid: int) -> None:
    """Give the client that sends requests and takes times priority over the engine where they share cores: a client
    that waits for a core would measure its own waiting. Child processes inherit it; it is the same for every engine."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, NICE)
    with contextlib.suppress(OSError):  # a session is a scheduler group; `nice` applies only within the group
        Path(f"/proc/{pid}/autogroup").write_text(str(NICE))


def _log_file(name: str, folder: Path | None) -> Path:
    if folder is None:
        handle, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".log")
        os.close(handle)
        return Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    while (path_there := folder / f"{name}{f'-{number}' if number else ''}.log").exists():
        number += 1
    return path_there


def _wait_until_gone(processes: Sequence[psutil.Process], seconds: float = 30.0) -> None:
    """Wait until the processes have exited: a large one takes a while to free its memory for the next."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
                time.sleep(0.05)
                continue
            return


def _alive(pids: Sequence[int]) -> list[psutil.Process]:
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            processes.append(psutil.Process(pid))
    return processes


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return "unknown"


def _short(line: str, most: int = 300) -> str:
    return line if len(line) <= most else line[:most] + "..."
