"""Monitors sample during a run: regularly, with one clock, and without disturbing it or each other."""

from __future__ import annotations

import itertools
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from spillover.errors import SpilloverError
from spillover.lab.monitors import CpuMonitor, NvmlMonitor, Recorder, Row, read_parquet, write_parquet
from spillover.lab.monitors.exporter import Exporter, pcp_instructions


class Counting:
    """A monitor that counts its readings; may be slow, and may fail."""

    def __init__(self, source: str, seconds: float = 0.0, fails: bool = False, absent: str | None = None) -> None:
        self.source, self.readings, self.closed = source, 0, False
        self._seconds, self._fails, self._absent = seconds, fails, absent

    def open(self) -> str | None:
        return self._absent

    def read(self) -> Mapping[str, float]:
        time.sleep(self._seconds)
        self.readings += 1
        if self._fails:
            raise OSError("gone")
        return {"readings_total": float(self.readings), 'depth{queue="a"}': 2.0, "broken": float("nan")}

    def close(self) -> None:
        self.closed = True


@pytest.mark.alone
def test_readings_are_steady_on_one_clock_and_a_slow_monitor_holds_up_no_other() -> None:
    quick, slow = Counting("quick"), Counting("slow", seconds=0.25)
    before = time.time()
    with Recorder([quick, slow], hz=20) as recorder:
        time.sleep(1.0)
    after = time.time()
    times = [row.time for row in recorder.rows if row.source == "quick" and row.metric == "readings_total"]
    assert before <= times[0]
    assert times[-1] <= after
    assert 12 <= len(times) <= 23  # 20 in one second, the first, the last; fewer if delayed
    assert len({row.time for row in recorder.rows if row.source == "slow"}) <= 6
    # At absolute times: except for delayed ones they are near multiples of the period.
    late = sorted((at - times[0] + 0.025) % 0.05 - 0.025 for at in times[:-1])
    assert abs(late[len(late) // 2]) < 0.02
    assert quick.closed
    assert slow.closed


def test_the_first_reading_comes_before_anything_that_is_watched() -> None:
    monitor = Counting("engine")
    with Recorder([monitor], hz=0.1):
        assert monitor.readings == 1


def test_a_monitor_that_fails_is_noted_once_and_the_run_goes_on() -> None:
    with Recorder([Counting("broken", fails=True), Counting("well")], hz=20) as recorder:
        time.sleep(0.3)
    assert recorder.notes == ["broken could not be read: OSError: gone"]
    assert {row.source for row in recorder.rows} == {"well"}


def test_what_is_absent_is_noted_once_and_left_out() -> None:
    absent = Counting("gpu", absent="no GPU is watched: none")
    with Recorder([absent, Counting("well")], hz=20) as recorder:
        time.sleep(0.1)
    assert recorder.notes == ["no GPU is watched: none"]
    assert absent.readings == 0


def test_nan_is_no_value() -> None:
    with Recorder([Counting("well")], hz=20) as recorder:
        time.sleep(0.1)
    assert {row.metric for row in recorder.rows} == {"readings_total", 'depth{queue="a"}'}


def test_an_impossible_rate_is_refused() -> None:
    with pytest.raises(SpilloverError, match="at most 50"):
        Recorder([], hz=0)


def test_rows_come_back_from_parquet_as_they_were(tmp_path: Path) -> None:
    rows = [Row(1e9 + step / 7, source, metric, step * 0.1) for step, source, metric in
            itertools.product(range(5), ("cpu", "gpu"), ("a", 'b{x="1"}'))]
    path = write_parquet(rows, tmp_path / "deeper" / "rows.parquet")
    assert read_parquet(path) == rows
    assert [file.name for file in path.parent.iterdir()] == ["rows.parquet"]


def test_no_rows_are_a_file_too(tmp_path: Path) -> None:
    assert read_parquet(write_parquet([], tmp_path / "rows.parquet")) == []


# The exporter, read by third-party parsers

def scrape(url: str, accept: str) -> tuple[str, str]:
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


@pytest.mark.parametrize(("accept", "parse"), [
    ("application/openmetrics-text; version=1.0.0", openmetrics), ("text/plain", prometheus)])
def test_the_exporter_s_page_is_what_prometheus_and_co_pilot_read(accept: str, parse: object) -> None:
    engine, cpu = Counting("engine"), CpuMonitor()
    with Exporter([engine, cpu, NvmlMonitor(), Counting("broken", fails=True)], port=0) as exporter:
        assert engine.readings == 0  # read on request, not before
        kind, text = scrape(exporter.url, accept)
        scrape(exporter.url, accept)
    assert kind.startswith(accept.partition(";")[0])
    families = {family.name: family for family in parse(text)}  # type: ignore[operator]
    assert families["readings"].type == "counter"
    assert [sample.value for sample in families["readings"].samples if sample.name == "readings_total"] == [1.0]
    assert [sample.labels for sample in families["depth"].samples] == [{"queue": "a"}]
    assert {sample.labels["core"] for sample in families["spillover_lab_cpu_busy_percent"].samples} >= {"0"}
    assert engine.readings == 2
    assert engine.closed


def test_a_person_is_told_what_co_pilot_wants() -> None:
    told = pcp_instructions("http://127.0.0.1:9400/metrics")
    assert "http://127.0.0.1:9400/metrics" in told
    assert "openmetrics/config.d/spillover.url" in told
