"""The book: contents, light and dark, measured and missing results, and no requests to the network."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from spillover.cli.main import main
from spillover.course.book import html_of, render
from spillover.course.plots import plot
from spillover.course.runs import CourseRun
from spillover.course.tables import filled_rows
from spillover.course.week import all_weeks, load_week
from spillover.lab.experiment import Experiment
from support.lab.made_up_results import write_results
from support.servers.chromium import Chromium, find_chromium

pytest.importorskip("pyarrow")


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.add(given.get("id", ""))
        if tag == "a":
            self.links.append(given["href"])
        self.loaded += [given[name] for name in ("src", "data", "poster", "srcset") if name in given]
        if tag == "link":
            self.loaded.append(given["href"])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write made-up results of week 5 under other names: none of its arms has results, and the book must say so."""
    folder = tmp_path_factory.mktemp("course")
    write_results(folder / "week05-cpu" / "prefix", ("device", "host", "slow"), (1, 2, 4), blocks=3,
                  name="week05-prefix")
    CourseRun.of(folder, load_week(5), "cpu", "spillover").note("prefix", done=True)
    return folder


@pytest.fixture(scope="module")
def text(results: Path) -> str:
    return render(results, all_weeks())


def test_every_week_is_in_the_contents_and_has_its_table(text: str) -> None:
    page = Page(text)
    for week in all_weeks():
        assert f"#{week.name}" in page.links
        assert week.name in page.ids
        section = text.split(f'id="{week.name}"')[1].split('<section class="week"')[0]
        for row in week.metrics:
            assert str(html_of(row.name))[3:-5] in section
    assert text.count("Not run yet") == len(all_weeks()) - 1


def test_it_needs_no_network_and_follows_light_and_dark(text: str) -> None:
    page = Page(text)
    assert [link for link in page.links if not link.startswith("#")] == []
    assert {link[1:] for link in page.links} <= page.ids
    assert all(address.startswith("data:") for address in page.loaded)
    assert "default-src 'none'" in text
    assert not re.search(r"@import|url\((?!data:)", text)
    assert "prefers-color-scheme: dark" in text
    assert "<script" not in text


def test_html_in_a_page_is_shown_and_not_obeyed() -> None:
    assert "<script>" not in html_of("# a\n\n<script>alert(1)</script> `<b>`")


def test_a_plot_draws_every_value_inside_its_frame(results: Path) -> None:
    week = load_week(5)
    (hits, *_) = [row for row in filled_rows(CourseRun.of(results, week, "cpu", "spillover"))
                  if row.row.name == "TTFT vs prefix length"]
    sweep = replace(hits, columns=hits.columns[1:], rows=tuple((name, cells[1:]) for name, cells in hits.rows))
    for drawn, mark in ((hits, r'<rect x="[\d.]+" y="([\d.-]+)"'), (sweep, r'cy="([\d.-]+)"')):
        heights = [float(found) for found in re.findall(mark, plot(drawn) or "")]
        assert len(heights) == sum(cell is not None for _, cells in drawn.rows for cell in cells) >= 9
        assert all(0 <= height <= 240 for height in heights)
    assert plot(replace(hits, rows=())) is None


def test_the_commands_list_check_and_report(results: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    listed = runner.invoke(main, ["course", "list", "--results", str(results)])
    assert listed.exit_code == 0, listed.output
    assert "undecided" in listed.output
    assert runner.invoke(main, ["course", "show", "5"]).output.count("Prefix caching") >= 1
    checked = runner.invoke(main, ["course", "check", "5", "--results", str(results)])
    assert checked.exit_code == 0  # undecided is no failure
    assert "undecided:" in checked.output
    none = runner.invoke(main, ["course", "check", "1", "--results", str(results)])
    assert none.exit_code == 2
    assert "spill course run 1" in none.output
    assert runner.invoke(main, ["course", "check", "17"]).exit_code == 2
    book = tmp_path / "book.html"
    assert runner.invoke(main, ["course", "report", "--results", str(results), "--out", str(book)]).exit_code == 0
    assert "Made-up" not in book.read_text()
    told, lines = tmp_path / "told.json", tmp_path / "told.md"
    wanted = ["course", "report", "--results", str(results), "--out", str(book), "--output-json", str(told),
              "--markdown", str(lines), "--note", "made up"]
    assert runner.invoke(main, wanted).exit_code == 0
    (run,) = json.loads(told.read_text())["runs"]
    asked = [each.says for each in load_week(5).expect if "cpu" in each.scales]
    assert [each["says"] for each in run["checks"]] == asked
    assert json.loads(told.read_text())["checks"] == {"holds": 0, "does not hold": 0, "undecided": len(asked)}
    assert all(each["text"] in lines.read_text() for each in run["checks"])
    job = tmp_path / "week.sbatch"
    assert runner.invoke(main, ["course", "run", "5", "--scale", "gpu", "--sbatch", str(job)]).exit_code == 0
    assert job.read_text().endswith("spill course run 5 --scale gpu\n")


def test_a_week_is_run_once_and_goes_on_only_if_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The lab is replaced by one that writes made-up results, a command by one that writes its JSON or fails."""
    ran: list[str] = []

    def lab(_console: Any, experiment: Experiment, folder: Path, **_options: Any) -> None:
        ran.append(experiment.name)
        if not folder.exists():
            write_results(folder, arms=("device",), rates=(), blocks=3, name=experiment.name)

    def command(given: list[str], **_options: Any) -> subprocess.CompletedProcess[str]:
        ran.append(" ".join(given))
        if "hf" in given:
            return subprocess.CompletedProcess(given, 2, "", "spill: transformers is not installed")
        Path(given[given.index("--output-json") + 1]).write_text(json.dumps({"results": [
            {"block_size": size, "num_blocks": 800 // size, "waste_percent": 2.0 * size} for size in (8, 16, 32)]}))
        return subprocess.CompletedProcess(given, 0, "", "")

    monkeypatch.setattr("spillover.cli.lab.lab_run.run_in_terminal", lab)
    monkeypatch.setattr("spillover.lab.report.write_report", lambda folder: None)
    monkeypatch.setattr("spillover.cli.course.subprocess.run", command)
    runner, asked = CliRunner(), ["course", "run", "4", "--results", str(tmp_path)]
    first = runner.invoke(main, asked)
    assert first.exit_code == 0, first.output
    assert len(ran) == 3
    assert "transformers is not installed" in first.output
    assert first.output.count("holds: ") == 2  # for blocks; the made-up arms are not those of the week
    assert "checks: 2 holds, 0 does not hold, 1 undecided" in first.output
    assert (tmp_path / "book.html").is_file()
    assert runner.invoke(main, asked).exit_code == 0
    assert len(ran) == 4  # a failed step is repeated, a completed one is not
    assert runner.invoke(main, [*asked, "--again"]).exit_code == 0
    assert len(ran) == 7
    cut = runner.invoke(main, [*asked, "--again", "--limit", "0s"])
    assert cut.exit_code == 0, cut.output
    count = len(ran)
    assert runner.invoke(main, asked).exit_code == 0
    assert len(ran) == count + 2  # the interrupted experiment, and the failing command


def test_a_browser_shows_it_in_light_and_dark_and_asks_nobody(text: str, tmp_path: Path) -> None:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium here; on Debian: apt-get install chromium")
    (tmp_path / "profile").mkdir()
    book = tmp_path / "book.html"
    book.write_text(text)
    with Chromium(program, tmp_path / "profile") as browser:
        for dark in (False, True):
            browser.open(book.as_uri(), dark=dark)
            assert browser.evaluate("document.querySelectorAll('.contents a').length") == len(all_weeks())
            assert browser.evaluate("document.querySelectorAll('figure svg').length") >= 1
            behind = browser.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (behind == "rgb(19, 19, 18)") == dark
        assert browser.problems == []
        assert set(browser.addresses) == {book.as_uri()}
