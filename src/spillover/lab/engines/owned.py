"""An engine that the lab starts itself: the common part of the adapters of spillover, vLLM, SGLang and llama.cpp."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from spillover.errors import SpilloverError
from spillover.lab.engines.base import CacheReset, Engine, EngineFailed, EngineSpec, Missing, Running
from spillover.lab.engines.process import ServerProcess, environment, free_port, is_foreign, status_of

ENDING_SECONDS = 2.0  # seconds for a crashing process to exit: it closes sockets first, and may dump its memory


class OwnedEngine(Engine):
    """An engine started by the lab. A subclass defines the command, the health page and the cache reset."""

    HEALTH: ClassVar[str] = "/health"
    RESET: ClassVar[str | None] = None  # path of a POST that empties the prefix cache; None if there is none
    ENV: ClassVar[Mapping[str, str]] = {}  # environment that the lab needs; the spec's has precedence

    def __init__(self, spec: EngineSpec, log_folder: Path | None = None) -> None:
        super().__init__(spec, log_folder)
        self._process: ServerProcess | None = None

    @abstractmethod
    def command(self, port: int) -> list[str]: ...

    def start(self) -> Running:
        if self._process is not None:
            raise SpilloverError(f"the {self.kind} engine runs already; stop it before it is started again")
        absent = self.installed(self.spec)
        if absent is not None:
            raise SpilloverError(str(absent))
        port = free_port()
        command = self.command(port)
        process = ServerProcess(self.kind, command, port, {**self.ENV, **self.spec.env}, self.log_folder,
                                is_foreign(command[0]))
        seconds = process.start(self.spec.ready_seconds, self.healthy)
        self._process = process
        self._running = Running(process.url, "", process.pid, process.log_path, "", process.command, seconds)
        try:
            self._running = Running(process.url, self._model_name(), process.pid, process.log_path, self.version(),
                                    process.command, seconds)
        except BaseException:
            self.stop()
            raise
        return self._running

    def healthy(self, url: str) -> bool:
        return status_of(url + self.HEALTH) == 200

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()
        self._process = self._running = None

    def check(self) -> None:
        if self._process is None:
            return
        self._process.check()
        if status_of(self._process.url + self.HEALTH, timeout=30) != 200:
            self._process.check(patience=ENDING_SECONDS)
            raise EngineFailed("crash", f"{self.kind} is running but no longer answers {self.HEALTH} with 200",
                               self._process.tail())

    def pids(self) -> tuple[int, ...]:
        return self._process.pids() if self._process is not None else ()

    def reset_cache(self) -> CacheReset:
        if self.RESET is None:
            return CacheReset(False, f"{self.kind} cannot empty its prefix cache: use prompts that it has not seen")
        status = self.post(self.RESET)
        if status == 200:
            return CacheReset(True, f"POST {self.RESET}")
        return CacheReset(False, f"POST {self.RESET} was answered with {status}: use prompts that it has not seen")

    def log(self) -> str:
        """Return the end of the server's log."""
        return self._process.log_tail_text() if self._process is not None else ""

    def _model_name(self) -> str:
        listed = self.get_json("/v1/models")
        try:
            return str(listed["data"][0]["id"])
        except (TypeError, KeyError, IndexError) as error:
            raise EngineFailed("no start", f"{self.kind} is healthy but /v1/models names no model",
                               self.log()) from error


def program_beside(python: str, program: str) -> str | None:
    """Return the path of a program installed next to an environment's interpreter; None if there is none."""
    path = Path(python).with_name(program)
    return str(path) if path.exists() else None


def has_module(python: str, module: str) -> bool:
    """Return whether an interpreter can import a module; checked by running it, as it may be another environment's."""
    if shutil.which(python) is None:
        return False
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    return run_python(python, code) is not None


def module_version(python: str, *distributions: str) -> str:
    """Return the version of the first distribution that the interpreter's environment has; "" if none."""
    code = ("import importlib.metadata as m, sys\n"
            f"for name in {distributions!r}:\n"
            "    try: print(m.version(name)); break\n"
            "    except m.PackageNotFoundError: pass")
    return (run_python(python, code) or "").strip()


def run_python(python: str, code: str) -> str | None:
    """Return the output of a few lines of Python; None if they fail."""
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd="/",
                              env=environment({}, is_foreign(python)))
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


@lru_cache(maxsize=1)
def cuda_devices() -> int:
    """Count NVIDIA devices with nvidia-smi, so that no library needs to be loaded."""
    if shutil.which("nvidia-smi") is None:
        return 0
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
        return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return 0


def interpreter(spec: EngineSpec) -> str:
    """Return the Python of the engine's environment: the arm's, that of the variable, or the current one."""
    return spec.python or os.environ.get(_variable(spec)) or sys.executable


def not_found(spec: EngineSpec, what: str, install: str) -> Missing:
    python = interpreter(spec)
    where = "this environment" if python == sys.executable else python
    return Missing(f"{what} is not in {where} ('python:' of the arm or {_variable(spec)} may name another)", install)


def _variable(spec: EngineSpec) -> str:
    return f"SPILLOVER_{spec.kind.upper()}_PYTHON"
