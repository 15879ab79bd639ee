"""CUDA C++ sources, compiled at first use by the NVRTC that comes with PyTorch; binaries are kept in a cache folder."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from pathlib import Path

import torch

from spillover.kernels.native.build import cache_folder

log = logging.getLogger("spillover.kernels")

_CLUSTER, _BEGIN_EARLY = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION
_MOST_SHARED, _SHARED_SHARE = 8, 9  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, _PREFERRED_SHARED_MEMORY_CARVEOUT
_DEVICE_SHARED = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_OWN_SHARED = 1 << 10  # bytes of static shared memory that a kernel may have in addition to the launch's


class CudaError(RuntimeError):
    """An error of NVRTC or the driver, described in a few words."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, with an array of integers as its value."""

    _fields_ = (("id", c_int), ("padding", c_int), ("values", c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
                ("attributes", c_void_p), ("num_attributes", c_uint))


def prefer_shared_memory(function: int) -> None:
    """Make multiprocessors that run a kernel give shared memory the largest possible part of their memory."""
    ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(c_void_p(function), _SHARED_SHARE, 100)


class Module:
    """The kernels of one source on one device, each with one structure as argument. `shared`: maximum for a launch."""

    def __init__(self, source: Path, options: tuple[str, ...], device: torch.device) -> None:
        """Compile and load the source; raise CudaError if that is not possible."""
        try:
            binary = compiled(source, (*architecture(device), *options))
            self._driver = ctypes.CDLL("libcuda.so.1")
        except (ImportError, OSError, AttributeError) as problem:  # no NVRTC, or PyTorch does not expose it
            raise CudaError(str(problem)) from None
        self._module = c_void_p()
        self._kernels: dict[str, c_void_p] = {}
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # creates the context of the device
            self._checked("load", self._driver.cuModuleLoadData(byref(self._module), binary))
            shared = c_int()
            self._checked("shared memory", self._driver.cuDeviceGetAttribute(
                byref(shared), _DEVICE_SHARED, torch.cuda.current_device()))
            self.shared = shared.value - _OWN_SHARED

    def load(self, kernel: str) -> c_void_p:
        """Load a kernel now: at its first launch, the driver might wait for running kernels to load it."""
        function = self._kernels[kernel] = c_void_p()
        self._checked(kernel, self._driver.cuModuleGetFunction(byref(function), self._module, kernel.encode()))
        for setting, value in ((_MOST_SHARED, self.shared), (_SHARED_SHARE, 100)):
            self._checked(kernel, self._driver.cuFuncSetAttribute(function, setting, value))
        now = getattr(self._driver, "cuFuncLoad", None)  # available from CUDA 12.4 on
        if now is not None:
            self._checked(kernel, now(function))
        return function

    def launch(self, kernel: str, grid: int, threads: int, arguments: ctypes.Structure, shared: int = 0,
               early: bool = False, cluster: int = 1) -> None:
        """Launch on PyTorch's current stream. `early`: before the previous kernel has completed (triton/launch.py);
        `cluster`: number of blocks that run concurrently and can access each other's shared memory."""
        function = self._kernels.get(kernel) or self.load(kernel)
        wanted = [_Attribute(_BEGIN_EARLY, 0, (c_int * 16)(1))] if early else []
        if cluster > 1:
            wanted.append(_Attribute(_CLUSTER, 0, (c_int * 16)(cluster, 1, 1)))
        attributes = (_Attribute * 2)(*wanted)
        config = _Config((grid, 1, 1), (threads, 1, 1), shared, torch.cuda.current_stream().cuda_stream,
                         ctypes.addressof(attributes), len(wanted))
        pointers = (c_void_p * 1)(ctypes.addressof(arguments))
        self._checked(kernel, self._driver.cuLaunchKernelEx(byref(config), function, pointers, None))

    def _checked(self, what: str, code: int) -> None:
        if code:
            text = c_char_p()
            self._driver.cuGetErrorString(code, byref(text))
            raise CudaError(f"{what}: {(text.value or str(code).encode()).decode()}")


def module_or_none(source: Path, options: tuple[str, ...], device: torch.device, instead: str,
                   unsupported: str = "") -> Module | None:
    """Return the module, or None if it cannot be loaded, which is logged once with what is done `instead`.
    `unsupported`: why the device is not supported; empty if it is."""
    try:
        if unsupported:
            raise CudaError(unsupported)
        return Module(source, options, device)
    except CudaError as problem:
        _warn(instead, str(problem).partition("\n")[0])
        return None


@cache
def _warn(instead: str, problem: str) -> None:
    log.warning("%s: %s", instead, problem)


def architecture(device: torch.device) -> tuple[str, ...]:
    """Return the compiler options for a device."""
    major, minor = torch.cuda.get_device_capability(device)
    own = "a" if (major, minor) == (9, 0) else ""  # sm_90a has instructions of this architecture alone
    return f"--gpu-architecture=sm_{major}{minor}{own}", "--std=c++17"


def compiled(source: Path, options: tuple[str, ...]) -> bytes:
    """Return the binary of a source, from the cache folder if it is cached. The source may include headers of the
    folder `include` next to it."""
    from torch.cuda._utils import _get_gpu_rtc_library

    nvrtc = _get_gpu_rtc_library()
    version = c_int(), c_int()
    nvrtc.nvrtcVersion(byref(version[0]), byref(version[1]))
    text = source.read_bytes()
    named = "\0".join((*options, *(str(part.value) for part in version))).encode()
    headers = source.parent / "include"
    included = b"\0".join(path.read_bytes() for path in sorted(headers.glob("*.cuh")))
    digest = hashlib.blake2b(b"\0".join((named, text, included)), digest_size=10).hexdigest()
    path: Path | None = None
    with contextlib.suppress(OSError):  # without a cache folder the source is compiled every time
        path = cache_folder("cuda") / f"{source.stem}-{digest}.cubin"
        return path.read_bytes()
    binary = _compile(nvrtc, source.name, text, (*options, f"--include-path={headers}"))
    if path is not None:
        with contextlib.suppress(OSError):
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(binary)
            os.replace(file.name, path)
    return binary


def compile_ahead(source: Path, wanted: Iterable[tuple[str, ...]], device: torch.device) -> None:
    """Compile a source with each of these options, several at a time; errors are reported when it is launched."""
    problems = CudaError, ImportError, OSError, AttributeError
    with ThreadPoolExecutor(os.cpu_count()) as pool, contextlib.suppress(*problems):
        for _ in pool.map(lambda options: compiled(source, (*architecture(device), *options)), wanted):
            pass


def _compile(nvrtc: ctypes.CDLL, name: str, text: bytes, options: tuple[str, ...]) -> bytes:
    program = c_void_p()
    if nvrtc.nvrtcCreateProgram(byref(program), text, name.encode(), 0, None, None):
        raise CudaError("NVRTC could not create a program")
    try:
        # Generic lambdas cannot be made device functions in any other way.
        options = *options, "--device-as-default-execution-space"
        given = (c_char_p * len(options))(*(option.encode() for option in options))
        size = c_size_t()
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            nvrtc.nvrtcGetProgramLogSize(program, byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CudaError(log.value.decode(errors="replace").strip()[:500] or "NVRTC failed")
        nvrtc.nvrtcGetCUBINSize(program, byref(size))
        binary = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, binary)
        return binary.raw
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))
