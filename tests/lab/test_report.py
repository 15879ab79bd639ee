"""A report agrees with its results: verdicts first, none for an arm that fails a gate, the same numbers everywhere.

The numbers are made up (`made_up_results`); verdicts and medians are the lab's own analysis of them.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spillover.bench.records import ClientHealth, RequestRecord, Run
from spillover.errors import SpilloverError
from spillover.lab.report import ReportFiles, write_report
from spillover.lab.report.data import Report, Verdict, read_report
from spillover.lab.report.figures import LineFigure, StackFigure, figures, gaps_over_time, token_gaps
from spillover.lab.report.forest import forest
from spillover.lab.report.html import render
from spillover.lab.report.markdown import markdown
from spillover.lab.report.metric import metric, shown
from spillover.lab.report.page_template import embedded
from spillover.lab.report.tables import detailed_rows, gain_text, measured, summary_rows
from spillover.lab.report.wording import counts, faults, warnings
from support.lab.made_up_results import ARMS, START, write_results

pytest.importorskip("pyarrow")
pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return read_report(write_results(tmp_path_factory.mktemp("lab") / "made-up", rates=(2, 8)))


@pytest.fixture(scope="module")
def files(report: Report) -> ReportFiles:
    return write_report(report.folder)


def test_every_file_is_written_and_the_page_needs_no_other(files: ReportFiles) -> None:
    assert [path.name for path in files.all()[:5]] == ["report.html", "REPORT.md", "summary.csv", "detailed.csv",
                                                      "data.parquet"]
    assert files.plots[0].name == "benchmark_results.png"
    assert all(path.stat().st_size > 500 for path in files.all())
    page = files.html.read_text()
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#|data:)|@import|url\((?!#)""", page.partition('id="data"')[0])
    assert "default-src 'none'" in page
    assert len(page) < 2_000_000


def test_the_verdict_comes_first(report: Report, files: ReportFiles) -> None:
    page = files.html.read_text()
    places = [page.index(text) for text in (">Verdict ", ">Measured<", ">Figures<", ">Validity<",
                                            ">How it was run<")]
    assert places == sorted(places)
    host = next(one for one in report.primary_verdicts() if (one.workload, one.arm) == ("chats", "host"))
    assert host.verdict == "faster"
    row = next(row for row in forest(report).groups[0].rows if row.arm == "host")
    assert row.word == "faster"
    assert row.left is not None
    assert row.left > next(tick.left for tick in forest(report).ticks if tick.text == "1x")
    assert dict(counts(report))["faster"] >= 1
    assert "**faster**" in files.markdown.read_text()


def test_an_arm_that_fails_a_gate_has_a_reason_and_no_number(report: Report, files: ReportFiles) -> None:
    row = next(row for row in forest(report).groups[0].rows if row.arm == "warm")
    assert (row.word, row.gain, row.left) == ("no verdict", "", None)
    assert "31% of prompt tokens were hits" in row.why
    assert [fault.gate for fault in faults(report) if fault.fatal] == ["contamination"]
    assert faults(report)[0].where == "warm on chats"
    assert [(fault.reason, fault.where) for fault in faults(report) if not fault.fatal] == [
        ("1 run was disturbed by other load on the machine, and repeated", "device on chats")]
    line = next(line for line in files.markdown.read_text().splitlines() if line.startswith("| chats | warm |"))
    assert "no verdict" in line
    assert " - " in line


def test_results_recorded_under_earlier_names_are_read(tmp_path: Path) -> None:
    folder = write_results(tmp_path, arms=("device", "host"), rates=(), blocks=1)
    first = min((folder / "visits").glob("*.json"), key=lambda path: json.loads(path.read_text())["index"])
    visit = json.loads(first.read_text())
    first.write_text(json.dumps({**visit, "spoilt": visit["retried_faults"], "retried_faults": None}))
    read = read_report(folder).visits[0]
    assert [fault.gate for fault in read.retried_faults] == ["client-saturated"]
    run = read.run()
    assert run is not None
    written = run.records[0].to_json()
    written["asked_output"] = written.pop("requested_output_len")
    assert RequestRecord.from_json(written) == run.records[0]


def test_a_sweep_is_a_row_an_arm_and_one_reason_stands_for_all_of_its_steps(report: Report, tmp_path: Path) -> None:
    sweep = forest(report).groups[1]
    assert (sweep.name, sweep.columns) == ("rates", ("2", "8"))
    assert [line.arm for line in sweep.lines] == ["host", "warm", "slow"]
    slow = next(line for line in sweep.lines if line.arm == "slow")
    assert slow.cells[1] is not None
    assert (slow.cells[1].word, slow.why) == ("slower", "")
    short = read_report(write_results(tmp_path / "short", arms=("device", "host"), rates=(2, 8), blocks=1))
    assert "1 block, and at least 5 are needed" in forest(short).groups[1].lines[0].why


def test_an_arm_that_is_not_installed_is_told_with_what_installs_it(report: Report, files: ReportFiles) -> None:
    assert all(row.arm != "vllm" for group in forest(report).groups for row in group.rows)
    assert "pip install vllm" in files.html.read_text()
    assert "`pip install vllm`" in files.markdown.read_text()
    assert not any("vllm" in warning for warning in warnings(report))  # its runs are not missing


def test_better_is_right_of_one_whichever_way_a_metric_counts() -> None:
    lower = Verdict("w", "a", "median_ttft_ms", True, "faster", "faster", higher_is_better=False, ratio=0.5, low=0.4,
                    high=0.625, blocks=4)
    assert lower.gains == pytest.approx((2.0, 1.6, 2.5))
    assert gain_text(lower) == "2.00x (1.60 .. 2.50)"
    assert replace(lower, higher_is_better=True, verdict="slower").gains == pytest.approx((0.5, 0.4, 0.625))
    assert gain_text(replace(lower, verdict="no verdict")) == "-"


def test_summary_has_a_row_an_arm_and_group_and_detailed_one_a_run(report: Report, files: ReportFiles) -> None:
    summary, detailed = (list(csv.DictReader(path.open())) for path in (files.summary_csv, files.detailed_csv))
    assert [(row["workload"], row["arm"]) for row in summary] == [(group, arm) for group in ("chats", "rates")
                                                                  for arm in ARMS]
    assert len(detailed) == len(report.visits) == 4 * 3 * 6
    best = max(float(row["output_throughput"]) for row in detailed
               if (row["arm"], row["request-rate"]) == ("host", "8"))
    told = next(row for row in summary if (row["workload"], row["arm"]) == ("rates", "host"))
    assert float(told["max_output_throughput"]) <= best
    assert int(told["steps"]) == 2
    base = next(row for row in summary if (row["workload"], row["arm"]) == ("rates", "device"))
    assert float(told["max_output_throughput_over_baseline"]) == pytest.approx(
        float(told["max_output_throughput"]) / float(base["max_output_throughput"]))
    assert next(row for row in summary if row["arm"] == "vllm")["status"] == "skipped"
    assert "contamination" in next(row for row in summary if row["arm"] == "warm")["faults"]
    assert len({tuple(row) for row in summary_rows(report)}) == len({tuple(row) for row in detailed_rows(report)}) == 1


def test_a_ratio_is_the_same_number_in_every_file(tmp_path: Path) -> None:
    """For a metric where lower is better, the page, the text and the table all state how many times better."""
    folder = write_results(tmp_path / "latency", arms=("device", "host"), rates=(), primary="median_ttft_ms")
    report, files = read_report(folder), write_report(folder)
    row = next(row for row in csv.DictReader(files.summary_csv.open()) if row["arm"] == "host")
    verdict = report.primary_verdicts()[0]
    assert verdict.ratio is not None
    assert verdict.ratio < 1  # as measured, arm over baseline
    assert verdict.verdict == row["verdicts"] == "faster"
    assert row["verdict_metric"] == "median_ttft_ms"
    better, low, high = (float(row[name]) for name in ("times_better_than_baseline", "times_better_low",
                                                       "times_better_high"))
    assert better == pytest.approx(1 / verdict.ratio)
    shown_gain = f"{better:.2f}x ({low:.2f} .. {high:.2f})"
    assert gain_text(verdict) == shown_gain
    assert shown_gain in files.markdown.read_text()
    assert f"<b>{better:.2f}x</b><small>{low:.2f} .. {high:.2f}</small>" in files.html.read_text()
    assert f"{better:.2f}x faster" in json.loads((folder / "analysis.json").read_text())["headline"][0]


def test_parquet_has_every_request_with_its_tokens(report: Report, files: ReportFiles) -> None:
    import pyarrow.parquet as pq

    table = pq.read_table(files.parquet)
    assert table.num_rows == 40 * len(report.visits)
    first = table.slice(0, 1).to_pylist()[0]
    run = report.visits[0].run()
    assert run is not None
    assert first["ttft"] == pytest.approx(run.records[0].chunks[0][0] - run.records[0].sent)
    assert first["token_times"] == [at for at, _ in run.records[0].chunks]
    assert first["start_unix"] == START
    assert first["tokens_device"] == 76


def test_tables_have_medians_their_spread_and_the_limit(report: Report) -> None:
    table = measured(report, report.workloads[0])
    row = next(row for row in table.rows if row[0].text == "host")
    cells = dict(zip(table.headings, row, strict=True))
    values = sorted(visit.metrics["output_throughput"] for visit in report.ran("chats", "host"))
    assert cells["output, tok/s"].value == pytest.approx(np.median(values))
    assert cells["output, tok/s"].detail == f"{shown(values[0], 'tok/s')} .. {shown(values[-1], 'tok/s')}"
    assert cells["of limit"].text == "63% (memory)"
    assert cells["prefix hits"].text == "79%"
    assert next(row for row in table.rows if row[0].text == "vllm")[1].text == "skipped"


def test_parts_of_the_latency_and_of_prompt_tokens_add_up(report: Report) -> None:
    found = {figure.key: figure for figure in figures(report)}
    sources, split = found["sources"], found["split"]
    assert isinstance(sources, StackFigure)
    assert isinstance(split, StackFigure)
    assert all(sum(row.parts) == pytest.approx(1) for row in sources.rows)
    host = next(row for row in split.rows if (row.workload, row.arm) == ("chats", "host"))
    cell = report.cell("chats", "host")
    assert cell is not None
    assert dict(zip(split.parts, host.parts, strict=True))["prefill"] == pytest.approx(cell.split["prefill"])
    silent = next(row for row in split.rows if (row.workload, row.arm) == ("chats", "slow"))
    assert silent.parts[:4] == (0, 0, 0, 0)  # it reports no phases: only what the client measured
    assert silent.note


def test_every_section_of_the_issue_has_its_figure(report: Report) -> None:
    found = {figure.key: figure for figure in figures(report)}
    assert list(found) == ["curves", "split", "sources", "runs", "ttft", "rate", "itl", "machine"]
    curves, machine = found["curves"], found["machine"]
    assert isinstance(curves, LineFigure)
    assert isinstance(machine, LineFigure)
    assert {len(line.points) for line in curves.panels[0].lines} == {2}
    assert {panel.choice for panel in machine.panels} == {"resident memory", "CPU busy", "KV cache in use"}
    memory = next(panel for panel in machine.panels if panel.choice == "resident memory")
    assert memory.lines[0].points[0] == (-1.0, pytest.approx(1.08e9))  # on the run's clock, processes not counted twice
    busy = next(panel for panel in machine.panels if panel.choice == "CPU busy")
    assert all(0.7 < y < 0.9 for _, y in busy.lines[0].points)


def test_a_chunk_of_several_tokens_is_several_gaps_and_a_stall_is_not_averaged_away(report: Report) -> None:
    chunks = ((0.0, 1), (0.1, 1), (0.4, 3))
    run = Run((RequestRecord(0, 0.0, 0.0, chunks, 0.4, 8, 5, 5),), START, 0.4, ClientHealth(), (0.0, 0.4))
    times, gaps = gaps_over_time(run)
    assert gaps.tolist() == pytest.approx([0.1, 0.1, 0.1, 0.1])
    assert times.tolist() == pytest.approx([0.1, 0.4, 0.4, 0.4])
    drawn = token_gaps(report)
    assert drawn is not None
    assert max(max(line.upper) for line in drawn.panels[0].lines) > 150  # the made-up spikes


def test_runs_that_all_passed_are_said_to_have_passed_beside_what_is_to_be_known(tmp_path: Path) -> None:
    report = read_report(write_results(tmp_path / "passed", arms=("device", "host"), rates=(), blocks=3))
    for text in (render(report, figures(report)), markdown(report, [])):
        assert "Every run passed every gate: cold-start, client-saturated, rate" in text
        assert "disturbed by other load" in text


def test_a_server_that_ran_out_of_memory_is_a_result_with_its_log(tmp_path: Path) -> None:
    report = read_report(write_results(tmp_path / "oom", arms=("device", "host", "slow"), rates=(), blocks=5,
                                       crashing="host"))
    host, slow = forest(report).groups[0].rows
    assert (host.word, slow.word) == ("no verdict", "slower")
    assert "out of memory" in host.why
    page, text = render(report, figures(report)), markdown(report, [])
    assert "Killed &lt;9&gt;" in page
    assert "Killed <9>" in text
    assert [row["status"] for row in summary_rows(report)] == ["ok", "failed", "ok"]
    assert {row["reason"] for row in detailed_rows(report) if row["arm"] == "host"} == {"out of memory: killed"}


def test_results_of_an_interrupted_experiment_say_so(tmp_path: Path) -> None:
    report = read_report(write_results(tmp_path / "cut", arms=("device", "host"), rates=(), blocks=3, passes=1))
    assert warnings(report) == ["Not finished: 1 block done. The same command continues from here."]
    assert forest(report).groups[0].rows[0].word == "no verdict"
    assert "Not finished" in render(report, figures(report))
    assert "Not finished" in markdown(report, [])


def test_numbers_of_no_real_model_are_labelled(tmp_path: Path) -> None:
    report = read_report(write_results(tmp_path / "dummy", arms=("device", "host"), rates=(), blocks=1))
    dummy = replace(report, arms=tuple(replace(arm, label="random weights") for arm in report.arms))
    page = render(dummy, figures(dummy))
    assert "Not the numbers of a real model: device (random weights), host (random weights)." in page
    assert "Not the numbers of a real model" in markdown(dummy, [])


def test_one_arm_alone_is_shown_without_a_verdict(tmp_path: Path) -> None:
    report = read_report(write_results(tmp_path / "alone", arms=("device",), rates=(), blocks=1))
    assert "Nothing to compare" in render(report, figures(report))
    assert "Nothing to compare" in markdown(report, [])


def test_names_cannot_leave_their_place_in_the_page(tmp_path: Path) -> None:
    evil = "</script><script>document.title='taken'</script>"
    report = read_report(write_results(tmp_path / "evil", arms=("device", "host"), rates=(), blocks=1, about=evil))
    assert evil not in render(report, figures(report))
    assert "<" not in embedded({"name": evil})


def test_what_is_not_a_result_folder_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(SpilloverError, match="spill lab run"):
        write_report(tmp_path)


@pytest.mark.parametrize("library", ["matplotlib", "pyarrow"])
def test_a_library_that_is_missing_is_named_with_what_installs_it(report: Report, library: str,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SpilloverError, match=r"pip install 'spillover\[lab\]'"):
        write_report(report.folder)


def test_metrics_have_names_units_and_a_direction() -> None:
    assert (metric("p99_itl_ms").title, metric("p99_itl_ms").higher_is_better) == ("p99 ITL, ms", False)
    assert (metric("output_throughput").title, metric("output_throughput").higher_is_better) == ("output, tok/s", True)
    assert metric("median_ttft_scheduled_ms").label == "median TTFT from schedule"
    assert metric("something_new").title == "something new"
    assert [shown(value, "ms") for value in (1234.5, 12.34, 1.234, 0.0123, None)] == ["1,234", "12.3", "1.23", "0.0123",
                                                                                     "-"]
    assert [shown(value, "%") for value in (0.5, 0.054, 0.0)] == ["50%", "5.4%", "0%"]


