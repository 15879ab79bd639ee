"""The C++ kernels for float32 on the CPU: built on first use, kept in a cache folder, called through ctypes.

They have threads of their own (team.h), as many as torch is told to use: what is asked of the OpenMP runtime that torch
has loaded is that number alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

import torch  # also brings the OpenMP runtime that the library's symbols resolve to
from torch import Tensor

_FOLDER = Path(__file__).parent
# No -ffast-math: it would let the compiler reorder sums, and the kernels promise one order.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-fopenmp", "-Wno-psabi")
_ATTENTION = (
    *(c_void_p, c_int64, c_void_p, c_int64, *[c_void_p] * 4),
    *(*[c_int64] * 6, c_float, c_int64, c_void_p, c_int64),
)
_PARAMETERS = {
    "panel_width": (),
    "linear": (*[c_void_p] * 4, *[c_int64] * 3),
    "embedding": (*[c_void_p] * 3, *[c_int64] * 2),
    "multiplies_codes": (),
    "coded_linear": (*[c_void_p] * 4, *[c_int64] * 4),
    "coded_embedding": (*[c_void_p] * 3, *[c_int64] * 3),
    "rms_norm": (*[c_void_p] * 3, *[c_int64] * 4, c_float),
    "add_rms_norm": (*[c_void_p] * 5, *[c_int64] * 2, c_float),
    "silu_and_mul": (*[c_void_p] * 2, *[c_int64] * 2),
    "clamped_swiglu": (*[c_void_p] * 2, *[c_int64] * 2, c_float),
    "rope": (*[c_void_p] * 5, *[c_int64] * 6),
    "store_kv": (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, *[c_void_p] * 3, *[c_int64] * 6),
    "attention": _ATTENTION,
    "attention_range": (*_ATTENTION, c_void_p, *[c_int64] * 5, c_void_p, c_int64),
    "attention_in_place": (*_ATTENTION, c_void_p, *[c_int64] * 2),
    "attention_total_floats": (*[c_int64] * 4,),
    "attention_block": (
        *(*[c_void_p] * 3, c_float, c_void_p, c_int64, *[c_void_p] * 6, c_int64, *[c_void_p] * 5, *[c_int64] * 2),
        *(c_float, c_int64, c_void_p, c_void_p, c_int64, c_void_p, *[c_int64] * 7, c_void_p),
    ),
    "mlp_block": (*[c_void_p] * 3, c_float, *[c_void_p, c_int64, c_void_p] * 2, *[c_int64] * 3, c_void_p),
    "dense_layers": (c_void_p, c_int64, *[c_void_p] * 3, c_float, *[c_void_p] * 2, c_int64, c_float, *[c_int64] * 8,
                     c_void_p),
    "encode_block": (*[c_void_p] * 2, *[c_int64] * 5),
    "decode_block": (*[c_void_p] * 2, *[c_int64] * 5),
    "cuda_copy": (*[c_void_p] * 6, c_int64, *[c_void_p] * 2, c_int64),
    "host_experts_new": (c_void_p, c_float, c_void_p, *[c_int64] * 3),
    "host_experts_run": (*[c_int64] * 2, c_void_p, c_int64, c_void_p, c_int64, c_void_p),
    "host_experts_attach": (c_int64, *[c_void_p] * 4, *[c_int64] * 2),
    "host_experts_detach": (c_int64,),
    "host_experts_wake": (c_int64,),
    "host_experts_delete": (c_int64,),
    "stage_blocks": (c_void_p, *[c_int64] * 3, c_void_p),
    "stage_decoded": (c_void_p, *[c_int64] * 2, c_void_p, *[c_int64] * 4),
}
# Those that return a number.
_COUNTS = ("panel_width", "multiplies_codes", "attention_total_floats", "cuda_copy", "host_experts_new",
           "host_experts_run")


def library() -> ctypes.CDLL | None:
    """The kernels, or None where they are turned off or cannot be built."""
    return _traced or _load().library


def fused() -> ctypes.CDLL | None:
    """The kernels that do several operations at once; None too while each operation is to be seen by itself."""
    return None if _traced is not None else _load().library


@contextlib.contextmanager
def traced(record: Callable[[str], AbstractContextManager[object]]) -> Iterator[None]:
    """Every call within `record(its name)`, on whatever thread; for profiling."""
    global _traced
    loaded = _load().library
    _traced = None if loaded is None else cast(ctypes.CDLL, _Traced(loaded, record))
    try:
        yield
    finally:
        _traced = None


def multiplies_codes() -> bool:
    """Whether these kernels multiply with weights in the codes that a file has: see kernels.coded."""
    loaded = _load().library
    return loaded is not None and loaded.multiplies_codes() > 0


def describe() -> str:
    """One line for `spill doctor`."""
    return f"native CPU kernels: {_load().note}"


def serves(x: Tensor) -> bool:
    """Whether these kernels compute on this tensor."""
    return x.is_cpu and x.dtype is torch.float32 and _load().library is not None


@dataclass(frozen=True)
class _Loaded:
    library: ctypes.CDLL | None
    note: str


class _Traced:
    def __init__(self, library: ctypes.CDLL, record: Callable[[str], AbstractContextManager[object]]) -> None:
        self._library = library
        self._record = record

    def __getattr__(self, name: str) -> Callable[..., object]:
        function = getattr(self._library, name)

        def call(*arguments: object) -> object:
            with self._record(name):
                return function(*arguments)

        return call


_traced: ctypes.CDLL | None = None


class _BuildError(Exception):
    """Why there is no library, in a few words."""


@cache
def _load() -> _Loaded:
    if os.environ.get("SPILLOVER_NATIVE", "1") == "0":
        return _Loaded(None, "off (SPILLOVER_NATIVE=0)")
    try:
        compiler = _compiler()
        command = [compiler, "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native", *_FLAGS]
        name = f"kernels-{_digest(command)}.so"
        try:
            path = _cache_folder() / name
            if not path.exists():
                _build(command, path)
            loaded = ctypes.CDLL(str(path))
        except PermissionError:
            # A read-only home: build for this process alone. A loaded library outlives its file.
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, name)
                _build(command, path)
                loaded = ctypes.CDLL(str(path))
    except (_BuildError, OSError) as error:
        warnings.warn(f"the native CPU kernels are off, torch's will be used: {error}", RuntimeWarning, stacklevel=3)
        return _Loaded(None, f"off ({error})")
    for function, parameters in _PARAMETERS.items():
        getattr(loaded, function).argtypes = parameters
        getattr(loaded, function).restype = None
    for function in _COUNTS:
        getattr(loaded, function).restype = c_int64
    return _Loaded(loaded, f"on, panels of {loaded.panel_width()} channels, {path}")


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise _BuildError("no C++ compiler found; install g++ or set CXX")


def _cache_folder() -> Path:
    root = os.environ.get("SPILLOVER_CACHE")
    folder = Path(root) if root else Path.home() / ".cache" / "spillover"
    folder = folder / "native"
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} is not writable")
    return folder


def _digest(command: list[str]) -> str:
    """Names a build by all that decides its code."""
    version = subprocess.run([command[0], "--version"], capture_output=True, check=False).stdout
    digest = hashlib.blake2b(version + "\0".join([*command, _cpu()]).encode(), digest_size=10)
    for source in sorted([*_FOLDER.glob("*.cpp"), *_FOLDER.glob("*.h")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _cpu() -> str:
    """What -march=native looks at: the first processor's model and features."""
    described = [platform.machine(), platform.processor()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        first = cpuinfo.read_text().split("\n\n")[0]
        keys = ("model", "model name", "stepping", "flags", "Features", "CPU implementer", "CPU part")
        described += [line for line in first.splitlines() if line.split(":")[0].strip() in keys]
    return "\n".join(described)


def _build(command: list[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects, running = [], []
        for source in sorted(_FOLDER.glob("*.cpp")):
            objects.append(str(Path(folder, source.stem + ".o")))
            arguments = [*command, "-c", str(source), "-o", objects[-1]]
            running.append(subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True))
        complaints = [process.communicate()[1] for process in running]
        linked = Path(folder, path.name)
        if not any(process.returncode for process in running):
            # Without -fopenmp: its symbols are to be found in the runtime that is already loaded.
            link = [command[0], "-shared", *objects, "-o", str(linked)]
            running.append(subprocess.Popen(link, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True))
            complaints.append(running[-1].communicate()[1])
        for process, complaint in zip(running, complaints, strict=True):
            if process.returncode:
                raise _BuildError(f"{command[0]} failed: {complaint.strip()[:500] or process.returncode}")
        os.replace(linked, path)  # another process may build the same file; whoever is last wins, they are equal
