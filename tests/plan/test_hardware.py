"""The real machine, and container limits read from files like those of a container."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from spillover.errors import SpilloverError
from spillover.plan import measure as measure_module
from spillover.plan.cgroup import CgroupLimits, read_limits
from spillover.plan.hardware import Machine, probe, probe_memory
from spillover.plan.measure import measure_disk, measure_link, measure_pool, measure_rates, read_size
from support.plan_shapes import CPU, GIB


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def _limits(tmp_path: Path, membership: str, files: dict[str, str]) -> CgroupLimits:
    _write(tmp_path, {"self": membership} | {f"fs/{name}": text for name, text in files.items()})
    return read_limits(tmp_path / "self", tmp_path / "fs")


def test_a_pool_is_no_faster_than_copies_and_checksums() -> None:
    rates = measure_pool("cpu", 1 << 20, seconds=0.02)
    assert rates.to_host == rates.to_device
    assert 1e7 < rates.to_device < 1e12


def test_memory_is_known_without_torch() -> None:
    whole, available = probe_memory()
    assert whole == probe().memory
    assert 0 < available <= whole


def test_cgroup_v2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    limits = _limits(tmp_path, "0::/pod/box", {
        "pod/memory.max": "2000",
        "pod/memory.current": "1500",
        "pod/memory.stat": "anon 700\nactive_file 500\ninactive_file 300",
        "pod/cpu.max": "150000 100000",
        "pod/box/memory.max": "max",
        "pod/box/cpu.max": "max 100000",
    })
    assert limits == CgroupLimits(memory=2000, memory_free=1300, cpus=1.5)


def test_cgroup_v1(tmp_path: Path) -> None:
    limits = _limits(tmp_path, "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/", {
        "memory/docker/x/memory.limit_in_bytes": "5000",
        "memory/docker/x/memory.usage_in_bytes": "4000",
        "memory/docker/x/memory.stat": "cache 10\ntotal_inactive_file 1000\ntotal_active_file 0",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "cpu,cpuacct/docker/x/cpu.cfs_quota_us": "400000",
        "cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
    })
    assert limits == CgroupLimits(memory=5000, memory_free=2000, cpus=4.0)


def test_a_path_outside_the_mount_means_the_mount(tmp_path: Path) -> None:
    limits = _limits(tmp_path, "0::/kubepods/pod1/abc", {"memory.max": "700", "memory.current": "900"})
    assert limits == CgroupLimits(memory=700, memory_free=0, cpus=None)


@pytest.mark.parametrize("membership", ["", "0::/", "nonsense", "4:memory:/x"])
def test_no_limits(tmp_path: Path, membership: str) -> None:
    unlimited = str((1 << 63) - 4096)
    limits = _limits(tmp_path, membership, {"memory.max": "max", "memory/x/memory.limit_in_bytes": unlimited})
    assert limits == CgroupLimits(None, None, None)


def test_this_machine_makes_sense() -> None:
    machine = probe()
    assert machine.cores >= 1
    assert 0 < machine.memory_available <= machine.memory <= machine.memory_total
    assert 10 << 20 < machine.process_bytes < machine.memory_total
    assert machine.cache_free > 0


def test_the_cache_folder_need_not_exist_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILLOVER_CACHE", str(tmp_path / "not" / "yet"))
    machine = probe()
    assert machine.cache_folder == str(tmp_path / "not" / "yet")
    assert machine.cache_free > 0
    assert not (tmp_path / "not").exists()


def test_rates_are_positive_and_finite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def small(machine: Machine) -> int:
        return 8 << 20

    monkeypatch.setattr(measure_module, "read_size", small)
    rates = measure_rates("cpu", seconds=0.01)
    disk, link = measure_disk(tmp_path, size=16 << 20), measure_link("cpu", 100_000, seconds=0.01)
    for value in (rates.memory_read, rates.float32, disk.write, disk.read, link.to_host, link.to_device):
        assert math.isfinite(value)
        assert value > 0
    assert rates.device == "cpu"
    assert rates.host_to_device is None
    assert list(tmp_path.iterdir()) == []


def test_memory_is_read_past_the_cache_but_within_what_is_there() -> None:
    assert read_size(CPU) == 512 << 20
    large_cache = Machine(**{**CPU.__dict__, "last_level_cache": 300 << 20})
    assert read_size(large_cache) == 1200 << 20
    small = Machine(**{**CPU.__dict__, "memory_available": GIB})
    assert read_size(small) == GIB // 8


def test_a_disk_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpilloverError, match="is not a folder"):
        measure_disk(tmp_path / "nowhere")
