"""Compiles the C++ kernels, for a wheel or at first use. Imports the standard library alone, as setup.py runs it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_FOLDER = Path(__file__).parent
SOURCES = tuple(sorted(_FOLDER.rglob("*.cpp")))
# No -ffast-math: it would let the compiler reorder sums, and the kernels guarantee one order.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-pthread", "-Wno-psabi")
# An undefined symbol is reported by name at linking, rather than at loading.
LINK_FLAGS = ("-shared", "-pthread", *(("-Wl,--no-undefined",) if sys.platform == "linux" else ()))
_LONGEST = "mixture_"  # prefix of the sources that take longest to compile
_POLL_SECONDS = 0.05
_LOCK_SECONDS = 600  # time to wait for another process's build; after it this process builds as well
_PREFIX = "build-"  # prefix of temporary folders

Progress = Callable[[int, int], None]  # called with the number of compiled sources, and that of all


class BuildError(Exception):
    """A failed build, with the reason in a few words."""


class Level(NamedTuple):
    """An instruction level that a library of the wheel is compiled for."""

    name: str
    cores: str  # compiler flags
    features: str  # features that /proc/cpuinfo lists if cores have these instructions

    @property
    def file(self) -> str:
        return f"kernels-{self.name}.so"


_V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe"
_V4 = f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"
_V8_2 = "asimd crc32 atomics asimdrdm"
# By machine, best first: exactly the features that the sources check for at compile time.
LEVELS = {
    "x86_64": (
        Level("amx", "-march=x86-64-v4 -mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16",
              f"{_V4} avx512_vnni avx512_bf16 amx_tile amx_bf16"),
        Level("avx512-vnni", "-march=x86-64-v4 -mavx512vnni", f"{_V4} avx512_vnni"),
        Level("avx512", "-march=x86-64-v4", _V4),
        Level("avx2", "-march=x86-64-v3", _V3),
    ),
    "aarch64": (
        Level("i8mm", "-march=armv8.2-a+dotprod+i8mm", f"{_V8_2} asimddp i8mm"),
        Level("dotprod", "-march=armv8.2-a+dotprod", f"{_V8_2} asimddp"),
        Level("neon", "-march=armv8-a", "asimd"),
    ),
}


def levels() -> list[Level]:
    """Return the levels that the cores of this machine have, best first; none if the features are not known."""
    lines = (line.partition(":") for line in _cpuinfo())
    found = {feature for key, _, value in lines if key.strip() in ("flags", "Features") for feature in value.split()}
    return [level for level in LEVELS.get(platform.machine(), ()) if found.issuperset(level.features.split())]


def shipped_library() -> Path | None:
    """Return the library of the best level; None if none is shipped (an editable install) or fits the cores."""
    return next((path for level in levels() if (path := _FOLDER / level.file).exists()), None)


def command(cores: str = "") -> list[str]:
    """Return the compiler and its flags. `cores`: flags of a level; empty: those for the cores of this machine."""
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if name and (found := shutil.which(name)):
            return [found, *(cores or native).split(), *FLAGS]
    raise BuildError("no C++ compiler found; install g++ or set CXX")


def library_name(command: list[str]) -> str:
    """Return a file name that depends on everything that determines the library's code."""
    version = subprocess.run([command[0], "--version"], capture_output=True, check=False).stdout
    digest = hashlib.blake2b(version + "\0".join([*command, *LINK_FLAGS, _cpu()]).encode(), digest_size=10)
    for source in (*SOURCES, *sorted(_FOLDER.rglob("*.h"))):
        digest.update(source.read_bytes())
    return f"kernels-{digest.hexdigest()}.so"


def cache_folder(kind: str = "native") -> Path:
    root = os.environ.get("SPILLOVER_CACHE")
    folder = (Path(root).expanduser() if root else Path.home() / ".cache" / "spillover") / kind
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} is not writable")
    return folder


def build(command: list[str], path: Path, progress: Progress, sources: Sequence[Path] = SOURCES) -> None:
    """Write the library to `path`, unless another process does so first.

    An interrupted build removes its temporary folder; the folder of a killed build is removed by the next one.
    """
    progress(0, len(sources))
    with _only_build(path, lambda done: progress(done, len(sources))) as alone:
        if alone:
            for left in path.parent.glob(f"{_PREFIX}*"):
                shutil.rmtree(left, ignore_errors=True)
        if path.exists():
            progress(len(sources), len(sources))
            return
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=_PREFIX) as folder:
            objects = _compile(command, sources, Path(folder), progress)
            linked = Path(folder, path.name)
            link = [command[0], *LINK_FLAGS, *objects, "-o", str(linked)]
            done = subprocess.run(link, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                raise BuildError(f"{command[0]} failed: {_reason(done.stderr, done.returncode)}")
            os.replace(linked, path)


def _compile(command: list[str], sources: Sequence[Path], folder: Path, progress: Progress) -> list[str]:
    """Compile the sources into `folder`, at most one per core at a time, the slowest first."""
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    waiting = sorted(zip(sources, objects, strict=True), key=lambda pair: not pair[0].stem.startswith(_LONGEST))
    running: list[tuple[subprocess.Popen[bytes], Path]] = []
    try:
        while waiting or running:
            while waiting and len(running) < _cores():
                source, target = waiting.pop(0)
                log = folder / f"{source.stem}.log"
                with log.open("wb") as stderr:
                    arguments = [*command, "-c", str(source), "-o", target]
                    running.append((subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=stderr), log))
            ended = [(process, log) for process, log in running if process.poll() is not None]
            for process, log in ended:
                running.remove((process, log))
                if process.returncode:
                    reason = _reason(log.read_text(errors="replace"), process.returncode)
                    raise BuildError(f"{command[0]} failed: {reason}")
                progress(len(sources) - len(waiting) - len(running), len(sources))
            if not ended:
                time.sleep(_POLL_SECONDS)
    finally:
        for process, _ in running:
            process.kill()
            process.wait()
    return objects


def _reason(complaint: str, code: int) -> str:
    return complaint.strip()[:500] or f"exit code {code}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _only_build(path: Path, progress: Callable[[int], None]) -> Iterator[bool]:
    """Hold the folder's lock, which the system releases when its holder exits; yield False if it was not acquired.

    `progress` is called with the number of sources that the lock's holder has compiled.
    """
    opened = os.open(path.parent, os.O_RDONLY)
    try:
        yield _locked(opened, path, progress)
    finally:
        os.close(opened)


def _locked(opened: int, path: Path, progress: Callable[[int], None]) -> bool:
    deadline, seen = time.monotonic() + _LOCK_SECONDS, 0
    while True:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if path.exists() or time.monotonic() > deadline:
                return False
        except OSError:  # a file system without locks
            return False
        done = len(list(path.parent.glob(f"{_PREFIX}*/*.o")))
        if done > seen:
            progress(seen := done)
        time.sleep(_POLL_SECONDS)


def _cpu() -> str:
    """Return what -march=native depends on: the first processor's model and features."""
    keys = ("model", "model name", "stepping", "flags", "Features", "CPU implementer", "CPU part")
    features = [line for line in _cpuinfo() if line.split(":")[0].strip() in keys]
    return "\n".join([platform.machine(), platform.processor(), *features])


def _cpuinfo() -> list[str]:
    """Return the lines of /proc/cpuinfo about the first processor."""
    path = Path("/proc/cpuinfo")
    return path.read_text().split("\n\n")[0].splitlines() if path.exists() else []
