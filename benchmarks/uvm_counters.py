"""Page faults and migrated bytes of managed memory, as counted by CUPTI. Needs CUPTI, a C compiler and a driver that
permits counting."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import tempfile
from collections.abc import Iterator
from ctypes import c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path

_KIND = 25  # CUPTI_ACTIVITY_KIND_UNIFIED_MEMORY_COUNTER
_ONE_DEVICE = 1
_IN, _BACK, _FAULTS = 1, 2, 4  # bytes to the device, bytes to the host, faults of the device
_LIBRARIES = ("libcupti.so.13", "libcupti.so.12", "libcupti.so", "/usr/local/cuda/lib64/libcupti.so",
              "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so")


class _Config(ctypes.Structure):
    _fields_ = (("scope", c_uint32), ("kind", c_uint32), ("device", c_uint32), ("enable", c_uint32))


class UvmCounters:
    def __init__(self) -> None:
        """Load CUPTI and compile its callbacks; raise OSError or SubprocessError if that is not possible."""
        self._cupti = _load(_LIBRARIES)
        with tempfile.TemporaryDirectory() as folder:
            built = str(Path(folder, "uvm_counters.so"))
            subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", built, str(Path(__file__).with_suffix(".c"))],
                           check=True, capture_output=True, timeout=60)
            self._own = ctypes.CDLL(built)
        for name in ("uvm_sum", "uvm_count"):
            getattr(self._own, name).restype = c_uint64
        self._own.uvm_init(ctypes.cast(self._cupti.cuptiActivityGetNextRecord, c_void_p))
        self._check("cuptiActivityRegisterCallbacks", self._cupti.cuptiActivityRegisterCallbacks(
            ctypes.cast(self._own.uvm_requested, c_void_p), ctypes.cast(self._own.uvm_completed, c_void_p)))

    @contextlib.contextmanager
    def counting(self, device: int = 0) -> Iterator[dict[str, int]]:
        """Yield a dictionary that gets the counts of what ran in this context when it is left."""
        import torch

        found: dict[str, int] = {}
        kinds = (_IN, _BACK, _FAULTS)
        configured = (_Config * len(kinds))(*(_Config(_ONE_DEVICE, kind, device, 1) for kind in kinds))
        self._check("cuptiActivityConfigureUnifiedMemoryCounter",
                    self._cupti.cuptiActivityConfigureUnifiedMemoryCounter(configured, c_uint32(len(kinds))))
        self._check("cuptiActivityEnable", self._cupti.cuptiActivityEnable(c_int(_KIND)))
        try:
            before = self._read()
            yield found
            torch.cuda.synchronize()
            after = self._read()
            found |= {name: value - before[name] for name, value in after.items()}
        finally:
            self._cupti.cuptiActivityDisable(c_int(_KIND))

    def _read(self) -> dict[str, int]:
        self._check("cuptiActivityFlushAll", self._cupti.cuptiActivityFlushAll(c_uint32(0)))
        own = self._own
        return {"bytes_in": own.uvm_sum(_IN), "bytes_back": own.uvm_sum(_BACK), "fault_groups": own.uvm_sum(_FAULTS),
                "faulted_pages": own.uvm_count(_FAULTS), "copies_in": own.uvm_count(_IN)}

    @staticmethod
    def _check(call: str, code: int) -> None:
        if code:
            raise OSError(f"{call} failed with CUPTI error {code}")


def _load(names: tuple[str, ...]) -> ctypes.CDLL:
    for name in names:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    raise OSError("CUPTI was not found")
