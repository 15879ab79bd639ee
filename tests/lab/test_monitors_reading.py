"""Each monitor reads what really happened."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from spillover.lab.engines.process import free_port, status_of
from spillover.lab.monitors import CpuMonitor, DiskMonitor, NvmlMonitor, ProcessMonitor, PrometheusMonitor
from spillover.lab.monitors.base import Rates, named
from support.servers.stub_environment import STUB

MIB = 2**20


def test_the_machine_s_cores_and_memory() -> None:
    monitor = CpuMonitor()
    assert monitor.open() is None
    time.sleep(0.1)
    found = monitor.read()
    cores = [value for name, value in found.items() if name.startswith("busy_percent{core=")]
    assert len(cores) == psutil.cpu_count()
    assert found["busy_percent"] == pytest.approx(sum(cores) / len(cores))
    assert 0 < found["memory_available_bytes"] < psutil.virtual_memory().total


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that holds 96 MiB and computes forever."""
    program = f"held = bytearray({96 * MIB}); held[::4096] = b'x' * len(held[::4096]); print(flush=True)\nwhile 1: pass"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def test_a_process_that_holds_memory_and_computes_is_seen_to(worker: subprocess.Popen[bytes]) -> None:
    monitor = ProcessMonitor(lambda: (worker.pid,))
    assert monitor.open() is None
    first = monitor.read()
    time.sleep(0.3)
    second = monitor.read()
    assert first["rss_bytes"] > 96 * MIB
    assert 96 * MIB < first["uss_bytes"] <= first["rss_bytes"]
    assert "uss_bytes" not in second  # needs a walk over page tables, so only every few seconds
    assert second["busy_percent"] > 5  # far below one core: other processes run here too
    assert any(name.startswith(f'rss_bytes{{pid="{worker.pid}"') for name in second)


def test_processes_may_come_and_go(worker: subprocess.Popen[bytes]) -> None:
    pids: list[int] = [worker.pid]
    monitor = ProcessMonitor(lambda: pids)
    monitor.open()
    assert monitor.read()
    worker.kill()
    worker.wait()
    assert monitor.read() == {}
    pids.clear()
    assert monitor.read() == {}


def test_an_engine_without_processes_is_not_watched() -> None:
    why = ProcessMonitor(lambda: ()).open()
    assert why is not None
    assert "the lab did not start it" in why


def test_a_disk_s_rate_is_what_its_counters_grew_by(monkeypatch: pytest.MonkeyPatch) -> None:
    def counters(total: int) -> SimpleNamespace:
        return SimpleNamespace(read_bytes=0, write_bytes=total, read_count=0, write_count=total)

    now = {"vda": counters(1000), "vda1": counters(1000), "loop0": counters(5)}
    monkeypatch.setattr(psutil, "disk_io_counters", lambda perdisk: now)
    clock = iter((10.0, *[10.0] * 3, *[12.0] * 4))
    monkeypatch.setattr("spillover.lab.monitors.base.time.monotonic", lambda: next(clock))
    monitor = DiskMonitor()
    assert monitor.open() is None
    now["vda"], now["vda1"] = counters(5000), counters(5000)
    found = monitor.read()
    assert found['written_bytes_per_second{disk="vda"}'] == 2000
    assert found["written_bytes_per_second"] == 2000  # the partition's bytes are not counted twice
    assert not any("loop" in name for name in found)


def test_rates_begin_with_the_second_reading_and_survive_a_reset() -> None:
    rates = Rates()
    assert rates.per_second("a", 100, 1.0) is None
    assert rates.per_second("a", 300, 2.0) == 200
    assert rates.per_second("a", 10, 3.0) is None
    assert rates.per_second("a", 20, 4.0) == 10


class NvmlError(Exception):
    pass


class NotSupportedError(NvmlError):
    pass


def nvml(count: int = 1, starts: bool = True) -> Any:
    """Return a substitute for the library, with a GPU that does not report its PCIe traffic."""
    def init() -> None:
        if not starts:
            raise NvmlError("Driver Not Loaded")

    def refuse(*_arguments: object) -> int:
        raise NotSupportedError("Not Supported")

    return SimpleNamespace(
        NVMLError=NvmlError, NVMLError_NotSupported=NotSupportedError, NVML_TEMPERATURE_GPU=0, NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2, NVML_PCIE_UTIL_RX_BYTES=1, NVML_PCIE_UTIL_TX_BYTES=0, nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: count, nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=97, memory=40),
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=10 * 2**30, total=32 * 2**30),
        nvmlDeviceGetPowerUsage=lambda gpu: 312_500, nvmlDeviceGetTemperature=lambda gpu, kind: 61,
        nvmlDeviceGetClockInfo=lambda gpu, kind: 1980, nvmlDeviceGetPcieThroughput=refuse)


def test_a_gpu_is_read_in_plain_units_and_not_asked_for_what_it_does_not_tell() -> None:
    monitor = NvmlMonitor(nvml(count=2))
    assert monitor.open() is None
    found = monitor.read()
    assert found['power_watts{gpu="1"}'] == 312.5
    assert found['memory_used_bytes{gpu="0"}'] == 10 * 2**30
    assert found['sm_clock_hertz{gpu="0"}'] == 1980e6
    assert found['utilization_percent{gpu="0"}'] == 97
    assert not any("pcie" in name for name in found)
    assert monitor.read() == found
    monitor.close()


@pytest.mark.parametrize("library", [nvml(starts=False), nvml(count=0)])
def test_without_a_gpu_the_monitor_says_so(library: Any) -> None:
    why = NvmlMonitor(library).open()
    assert why is not None
    assert why.startswith("no GPU is watched")


@pytest.mark.gpu
def test_a_real_gpu_is_read() -> None:
    monitor = NvmlMonitor()
    assert monitor.open() is None
    found = monitor.read()
    assert found['power_watts{gpu="0"}'] > 0
    assert 0 < found['memory_used_bytes{gpu="0"}'] < found['memory_total_bytes{gpu="0"}']
    assert {'utilization_percent{gpu="0"}', 'pcie_rx_bytes_per_second{gpu="0"}'} <= set(found)
    monitor.close()


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    page = tmp_path_factory.mktemp("page") / "page"
    page.write_text('work_total{who="stub"} N\nlatency_bucket{le="1"} 1\nlatency_sum 0.5\nlatency_count 1\ndepth 3\n')
    port = free_port()
    process = subprocess.Popen([sys.executable, str(STUB), "--port", str(port), "--page", str(page)])
    while status_of(f"http://127.0.0.1:{port}/health") != 200:
        assert process.poll() is None
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


def test_the_engine_s_page_is_read_without_its_buckets(server: str) -> None:
    monitor = PrometheusMonitor(server)
    assert monitor.open() is None
    assert monitor.read() == {'work_total{who="stub"}': 0.0, "latency_sum": 0.5, "latency_count": 1.0, "depth": 3.0}


def test_an_engine_without_a_page_is_not_watched() -> None:
    why = PrometheusMonitor("http://127.0.0.1:9").open()
    assert why is not None
    assert "no metrics of the engine" in why


def test_labels_are_written_so_that_they_can_be_read() -> None:
    assert named("a", pid=1, name='x"y') == 'a{pid="1",name="x\\"y"}'
    assert named("a") == "a"
