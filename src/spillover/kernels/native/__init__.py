"""The C++ kernels for float32 on the CPU, called through ctypes.

A wheel ships one library per instruction level, and the best one that the cores support is loaded. Without any, as in
an editable install, the kernels are compiled at first use and kept in a cache folder. SPILLOVER_NATIVE: 0 turns them
off, `compile` compiles them for exactly these cores, a path is a library to load. They have their own threads (team.h),
as many as torch uses.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from spillover.kernels.native import build

log = logging.getLogger("spillover.kernels")

_ATTENTION = (
    *(c_void_p, c_int64, c_void_p, c_int64, *[c_void_p] * 4),
    *(*[c_int64] * 6, c_float, c_int64, c_void_p, c_int64),
)
_PARAMETERS = {
    "set_threads": (c_int64,),
    "panel_width": (),
    "linear": (*[c_void_p] * 4, *[c_int64] * 3),
    "fp8_linear": (*[c_void_p] * 4, *[c_int64] * 3),
    "embedding": (*[c_void_p] * 3, *[c_int64] * 2),
    "multiplies_codes": (),
    "coded_linear": (*[c_void_p] * 4, *[c_int64] * 3),
    "coded_embedding": (*[c_void_p] * 3, *[c_int64] * 2),
    "pack_codes": (c_void_p, *[c_int64] * 4, *[c_void_p] * 2),
    "pack_numbers": (c_void_p, *[c_int64] * 4, *[c_void_p] * 2),
    "unpack_fields": (c_void_p, *[c_int64] * 5, c_void_p, c_int64),
    "int_scales": (c_void_p, *[c_int64] * 5, c_float, c_void_p, c_int64, *[c_void_p] * 2),
    "round_columns": (*[c_void_p] * 4, *[c_int64] * 6, *[c_void_p] * 2),
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
    "route": (c_void_p, *[c_int64] * 4, *[c_void_p] * 2),
    "expert_mlps": (*[c_void_p] * 4, *(c_void_p, c_int64, c_void_p, c_int64, c_int64) * 2, *[c_int64] * 4, c_float,
                    c_void_p),
    "mlp_block": (*[c_void_p] * 3, c_float, *[c_void_p, c_int64, c_void_p] * 2, *[c_int64] * 3, c_void_p),
    "decoder_layers": (c_void_p, c_int64, *[c_void_p] * 3, c_float, *[c_void_p] * 2, c_int64, c_float, *[c_int64] * 7,
                       c_float, c_void_p),
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
# Functions that return a number.
_COUNTS = ("panel_width", "multiplies_codes", "attention_total_floats", "cuda_copy", "host_experts_new",
           "host_experts_run")


def library() -> ctypes.CDLL | None:
    """Return the kernels, or None if they are turned off or cannot be built."""
    loaded = _with_torch_threads(_load().library)
    return _traced or loaded


def fused() -> ctypes.CDLL | None:
    """Return the library for fused operations; None also while calls are traced, so that each operation is recorded."""
    return None if _traced is not None else _with_torch_threads(_load().library)


@contextlib.contextmanager
def traced(record: Callable[[str], AbstractContextManager[object]]) -> Iterator[None]:
    """Run every call, on any thread, within `record(name of the kernel)`; for profiling."""
    global _traced, _record
    loaded = _load().library
    _record = record
    _traced = None if loaded is None else cast(ctypes.CDLL, _Traced(loaded, record))
    try:
        yield
    finally:
        _traced = _record = None


def record(name: str) -> AbstractContextManager[object]:
    """Return a context that is recorded under this name while calls are traced."""
    return contextlib.nullcontext() if _record is None else _record(name)


def panel_width() -> int:
    """Return the channels of a panel of float32 weights; 0 if these kernels are off, and weights are not packed."""
    loaded = _load().library
    return 0 if loaded is None else int(loaded.panel_width())


def multiplies_codes() -> bool:
    """Return whether these kernels multiply by the codes of a file: see kernels.formats.gguf_codes."""
    loaded = _load().library
    return loaded is not None and loaded.multiplies_codes() > 0


def on_build(callback: build.Progress) -> None:
    """Call `callback(done, total)` while the library is compiled: at the start with 0, then after each source.

    Must be set before the first use of a kernel. The callback is not called if the library is in the cache.
    """
    global _on_progress
    _on_progress = callback


def describe() -> str:
    """Return one line for `spill doctor`."""
    return f"native CPU kernels: {_load().note}"


def serves(x: Tensor) -> bool:
    """Return whether these kernels can compute on this tensor."""
    return x.is_cpu and x.dtype is torch.float32 and _load().library is not None


def pointer(tensor: Tensor | None) -> int:
    """Return a tensor's address as an argument of a kernel; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


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
_record: Callable[[str], AbstractContextManager[object]] | None = None  # recorder of calls; None: not traced
_threads = 0  # number of threads that was last set in the library


def _with_torch_threads(loaded: ctypes.CDLL | None) -> ctypes.CDLL | None:
    """Set the kernels' number of threads to that of torch, which has no callback for a change of it."""
    global _threads
    if loaded is not None and (threads := torch.get_num_threads()) != _threads:
        loaded.set_threads(threads)
        _threads = threads
    return loaded


def _ignore_progress(done: int, total: int) -> None: ...


_on_progress: build.Progress = _ignore_progress  # until on_build() sets another callback


@cache
def _load() -> _Loaded:
    setting = os.environ.get("SPILLOVER_NATIVE", "1")
    if setting == "0":
        return _Loaded(None, "off (SPILLOVER_NATIVE=0)")
    try:
        loaded, origin = _open(setting)
    except (build.BuildError, OSError) as error:
        warnings.warn(f"the native CPU kernels are off, torch's will be used: {error}", RuntimeWarning, stacklevel=3)
        return _Loaded(None, f"off ({error})")
    for function, parameters in _PARAMETERS.items():
        getattr(loaded, function).argtypes = parameters
        getattr(loaded, function).restype = None
    for function in _COUNTS:
        getattr(loaded, function).restype = c_int64
    note = f"on, panels of {loaded.panel_width()} channels, {origin}"
    log.info("native CPU kernels: %s", note)
    return _Loaded(loaded, note)


def _open(setting: str) -> tuple[ctypes.CDLL, str]:
    """Return the library and a description of its origin."""
    if setting == "1" and (shipped := build.shipped_library()) is not None:
        return ctypes.CDLL(str(shipped)), f"shipped as {shipped}"
    if setting not in ("1", "compile"):
        return ctypes.CDLL(setting), f"SPILLOVER_NATIVE={setting}"
    command = build.command()
    name = build.library_name(command)
    try:
        path = build.cache_folder() / name
        if not path.exists():
            build.build(command, path, _on_progress)
        return ctypes.CDLL(str(path)), f"compiled here as {path}"
    except PermissionError:
        # The cache folder is read-only: build for this process alone. A loaded library outlives its file.
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, name)
            build.build(command, path, _on_progress)
            return ctypes.CDLL(str(path)), "compiled for this process alone"
