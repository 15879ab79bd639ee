"""A monitor of NVIDIA GPUs by NVML, which nvidia-smi also uses: utilisation, memory, power, clocks, PCIe traffic."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from spillover.lab.monitors.base import named


class NvmlMonitor:
    """A monitor of all GPUs. Values that a GPU does not support (often PCIe traffic) are not queried again."""

    source = "gpu"

    def __init__(self, library: Any = None) -> None:
        """Create a monitor. `library`: pynvml, or a replacement in a test."""
        self._library = library
        self._queries: list[tuple[str, Callable[[], float]]] = []

    def open(self) -> str | None:
        try:
            nvml = self._library or importlib.import_module("pynvml")
        except ImportError:
            return "no GPU is watched: NVML needs the lab extra (pip install 'spillover[lab]')"
        try:
            nvml.nvmlInit()
            count = int(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            return f"no GPU is watched: {error}"
        self._library = nvml
        for index in range(count):
            self._queries += _queries(nvml, nvml.nvmlDeviceGetHandleByIndex(index), index)
        return None if count else "no GPU is watched: NVML finds none"

    def read(self) -> Mapping[str, float]:
        found, queries = {}, []
        for name, query in self._queries:
            try:
                found[name] = query()
            except self._library.NVMLError as error:
                if isinstance(error, self._library.NVMLError_NotSupported):
                    continue
            queries.append((name, query))
        self._queries = queries
        return found

    def close(self) -> None:
        if self._queries:
            self._queries = []
            self._library.nvmlShutdown()


def _queries(nvml: Any, gpu: Any, index: int) -> list[tuple[str, Callable[[], float]]]:
    """Return one query per value, so that an unsupported one does not affect others."""
    queries: dict[str, Callable[[], float]] = {
        "utilization_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
        "memory_utilization_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).memory,
        "memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
        "memory_total_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
        "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
        "temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        "sm_clock_hertz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM) * 1e6,
        "memory_clock_hertz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM) * 1e6,
        # NVML averages these over 20 ms and returns KB/s; tx is from the GPU to the host.
        "pcie_rx_bytes_per_second": lambda: nvml.nvmlDeviceGetPcieThroughput(gpu, nvml.NVML_PCIE_UTIL_RX_BYTES) * 1000,
        "pcie_tx_bytes_per_second": lambda: nvml.nvmlDeviceGetPcieThroughput(gpu, nvml.NVML_PCIE_UTIL_TX_BYTES) * 1000,
    }
    return [(named(metric, gpu=index), _number(query)) for metric, query in queries.items()]


def _number(query: Callable[[], float]) -> Callable[[], float]:
    return lambda: float(query())
