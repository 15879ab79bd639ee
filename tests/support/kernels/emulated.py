"""The native kernels built for other CPUs and run by an emulator, under the function names of this machine's library.

A call sends the memory of all tensors that its pointers point into, and copies the kernel's results back. Pointers
stored in memory are not followed, so kernels that take tables of pointers cannot be called.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spillover.kernels import native
from spillover.kernels.native.build import FLAGS, SOURCES, build, cache_folder, library_name

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
_CALLER = Path(__file__).parent / "caller.cpp"


def missing() -> str | None:
    """Return why nothing can be emulated on this machine; None if it can."""
    wanted = [program for program in (COMPILER, EMULATOR) if shutil.which(program) is None]
    return f"no {' and no '.join(wanted)}: apt-get install g++-aarch64-linux-gnu qemu-user-static" if wanted else None


@contextmanager
def emulated(cores: str, *names: str) -> Iterator[EmulatedLibrary]:
    """Build these sources for `cores`, a compiler flag, and make the emulated library that of native.library()."""
    command = [COMPILER, cores, *FLAGS]
    folder, name = cache_folder(), library_name([*command, _CALLER.read_text(), *names])
    library, caller = folder / name, folder / f"{name}.caller"
    if not library.exists():
        build(command, library, lambda done, total: None, [s for s in SOURCES if s.stem in names])
    if not caller.exists():
        subprocess.run([COMPILER, "-std=c++17", "-O1", "-static-libstdc++", str(_CALLER), "-o", str(caller), "-ldl"],
                       check=True)
    # The emulator offers all features that it knows; the library uses only those of the CPU under test.
    started = [EMULATOR, "-cpu", "max", "-L", "/usr/aarch64-linux-gnu", str(caller), str(library)]
    with (subprocess.Popen(started, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
          pytest.MonkeyPatch.context() as patch):
        found = EmulatedLibrary(process)
        patch.setattr(torch.Tensor, "data_ptr", found.data_ptr)
        patch.setattr(native, "_load", lambda: native._Loaded(found, "emulated"))  # type: ignore[arg-type]
        patch.setattr(native, "_threads", 0)
        try:
            yield found
        finally:
            process.kill()


class EmulatedLibrary:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._storages: dict[int, tuple[int, Tensor]] = {}  # address -> bytes, and a tensor that keeps it alive

    @property
    def data_ptr(self) -> Callable[[Tensor], int]:
        """Return a replacement of Tensor.data_ptr that also registers the tensor's storage."""
        plain = torch.Tensor.data_ptr

        def data_ptr(tensor: Tensor) -> int:
            storage = tensor.untyped_storage()
            self._storages[storage.data_ptr()] = storage.nbytes(), tensor
            return plain(tensor)

        return data_ptr

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: self._call(name, arguments)

    def _call(self, name: str, arguments: tuple[int | float | None, ...]) -> int:
        used: list[int] = []
        sent = []
        for kind, value in zip(native._PARAMETERS[name], arguments, strict=True):
            if kind is ctypes.c_float:
                sent.append(struct.pack("<qf", ord("f"), value))
            elif kind is ctypes.c_void_p and value:
                base = next(base for base, (size, _) in self._storages.items() if base <= value < base + size)
                if base not in used:
                    used.append(base)
                sent.append(struct.pack("<qqq", ord("p"), used.index(base), int(value) - base))
            else:
                sent.append(struct.pack("<qq", ord("i"), int(value or 0)))
        sizes = [self._storages[base][0] for base in used]
        to, back = self._process.stdin, self._process.stdout
        assert to is not None
        assert back is not None
        to.write(struct.pack("<q", len(name)) + name.encode() + struct.pack("<q", len(used)))
        for base, size in zip(used, sizes, strict=True):
            to.write(struct.pack("<q", size) + ctypes.string_at(base, size))
        to.write(struct.pack("<q", len(sent)) + b"".join(sent))
        to.flush()
        result = back.read(8)
        assert len(result) == 8, f"{name} ended the emulator: {self._process.wait()}"
        for base, size in zip(used, sizes, strict=True):
            ctypes.memmove(base, back.read(size), size)
        return int.from_bytes(result, "little", signed=True)
