"""CUDA C++ kernels compiled for the CPU with the system's C++ compiler; see emulated_cuda.cpp."""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from spillover.kernels.cuda.driver.tensor_map import BYTES, Map
from spillover.kernels.native.build import _cpu as cores
from spillover.kernels.native.build import cache_folder, command

_EMULATOR = Path(__file__).parent / "emulated_cuda.cpp"
# No automatic contraction: the kernels state where a product and a sum are rounded once.
FLAGS = ("-std=c++17", "-O2", "-fno-strict-aliasing", "-ffp-contract=off", "-w", "-Wno-psabi", "-shared", "-fPIC",
          "-U_FORTIFY_SOURCE")  # its checked longjmp rejects the switch to a fiber's stack


def described(address: int, kind: int, sizes: tuple[int, ...], strides: tuple[int, ...],
              box: tuple[int, ...]) -> ctypes.Array[ctypes.c_uint64]:
    """Describe a tensor for the emulated copies, in place of kernels.cuda.driver.tensor_map.tensor_map."""
    more = [1] * (4 - len(sizes))
    said = struct.pack("<Qii4i4q4i", address, len(sizes), 1 if kind == BYTES else 2, *sizes, *more, 0, *strides,
                       *[0] * len(more), *box, *more)
    return Map.from_buffer_copy(said.ljust(ctypes.sizeof(Map), b"\0"))


class EmulatedModule:
    """A module that launches kernels as kernels.cuda.driver.compiled.Module does, and lists every kernel launched."""

    shared = 226 << 10

    def __init__(self, source: Path, options: tuple[str, ...], late: bool = False) -> None:
        """`late`: run asynchronous copies only when they are waited for; otherwise at once."""
        self._library = _library(source, (*options, f"-DLATE={int(late)}"))
        self.launched: list[str] = []

    def launch(self, kernel: str, grid: int, threads: int, arguments: ctypes.Structure, shared: int = 0,
               early: bool = False, cluster: int = 1) -> None:
        assert shared <= self.shared
        self.launched.append(kernel)
        self._library.emulate(getattr(self._library, kernel), ctypes.c_uint(grid), ctypes.c_uint(threads),
                              ctypes.c_uint(cluster), ctypes.byref(arguments))


@cache
def _library(source: Path, options: tuple[str, ...]) -> ctypes.CDLL:
    headers = sorted(source.parent.glob("include/*.cuh"))
    return built((*FLAGS, *options, f'-DSOURCE="{source.name}"'), _EMULATOR, (source, *headers))


def built(options: tuple[str, ...], source: Path, included: tuple[Path, ...]) -> ctypes.CDLL:
    """Compile a library, or load the one already compiled from the same sources."""
    compiler = [*command()[:2], *options]  # includes flags for the CPU of this machine
    named = b"\0".join(("\0".join((*compiler, cores())).encode(), *(path.read_bytes() for path in (source, *included))))
    path = cache_folder() / f"emulated-{hashlib.blake2b(named, digest_size=10).hexdigest()}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder, path.name)
            beside = {f"-I{each.parent}" for each in included}  # not part of the key: a checkout may be in any folder
            subprocess.run([*compiler, *beside, str(source), "-o", str(made)], check=True)
            os.replace(made, path)
    return ctypes.CDLL(str(path))
