"""Forms in which a report is quoted: a badge, a PDF, and a site of many reports."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from spillover.cli.main import main
from spillover.errors import SpilloverError
from spillover.lab.report import site as sites
from spillover.lab.report.badge import badge
from spillover.lab.report.data import read_report
from spillover.lab.report.figures import figures
from spillover.lab.report.html import render
from spillover.lab.report.markdown import markdown
from spillover.lab.report.pdf import PROGRAMS, browser, write_pdf
from spillover.lab.report.site import publish
from support.lab.made_up_results import write_results
from support.servers.chromium import Chromium, find_chromium

pytest.importorskip("pyarrow")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lab-results")
    write_results(folder / "first", arms=("device", "host", "slow"), rates=(), blocks=5, name="tiers")
    write_results(folder / "other" / "second", arms=("device", "slow"), rates=(), blocks=5, name="engines",
                  about="Penguins & </script><b>.")
    (folder / "broken").mkdir()
    (folder / "broken" / "experiment.json").write_text('{"layout": 0}')
    return folder


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def without_plots(folder: Path) -> None:
    """Write the quick files of a report; plots take seconds."""
    report = read_report(folder)
    (folder / "report.html").write_text(render(report, figures(report)))
    (folder / "REPORT.md").write_text(markdown(report, []))


def test_a_badge_tells_one_verdict_with_its_interval_or_counts_several(results: Path) -> None:
    report = read_report(results / "first")
    name, told = texts(badge(report, arm="host"))
    assert name == "tiers"
    assert re.fullmatch(r"host 1\.\d\dx faster \(1\.\d\dx to 1\.\d\dx\)", told)
    found = next(verdict for verdict in report.primary_verdicts() if verdict.arm == "host")
    assert found.gains is not None
    assert told.split()[1] == f"{found.gains[0]:.2f}x"
    assert re.fullmatch(r"slow 1\.\d\dx slower \(1\.\d\dx to 1\.\d\dx\)", texts(badge(report, arm="slow"))[1])
    assert texts(badge(report)) == ["tiers", "1 faster, 1 slower"]
    root = ElementTree.fromstring(badge(report))
    assert root.get("aria-label") == "tiers: 1 faster, 1 slower"
    assert float(root.get("width") or 0) < 500
    assert texts(badge(report, label="<a> & b")) == ["<a> & b", "1 faster, 1 slower"]
    undecided = replace(report, verdicts=tuple(replace(verdict, verdict="no verdict", word="no verdict")
                                               for verdict in report.verdicts))
    assert texts(badge(undecided, arm="host"))[1] == "host: no verdict"
    with pytest.raises(SpilloverError, match="no verdict of the arm 'hots'; did you mean 'host'"):
        badge(report, arm="hots")
    with pytest.raises(SpilloverError, match="no verdict of the workload 'x'; there are chats"):
        badge(report, workload="x")


def test_a_site_holds_every_report_is_searched_and_asks_nobody(results: Path, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "write_report", without_plots)
    site = publish(results, tmp_path / "site")
    assert set(site.reports) == {"first", "other-second"}
    assert [each.partition(": ")[0] for each in site.left_out] == [str(results / "broken")]
    for name in site.reports:
        folder = tmp_path / "site" / name
        assert {file.name for file in folder.iterdir()} >= {"report.html", "REPORT.md", "badge.svg"}
        assert (folder / "badge.svg").read_text() == badge(read_report(results / name.replace("-", "/")))
    page = site.index.read_text()
    assert "http" not in re.sub(r"http://www\.w3\.org/\S+|http-equiv", "", page.partition('id="data"')[0])

    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium here; on Debian: apt-get install chromium")
    (tmp_path / "profile").mkdir()
    with Chromium(program, tmp_path / "profile") as tab:
        tab.open(site.index.as_uri())
        tab.wait("document.documentElement.dataset.ready")
        shown = "[...document.querySelectorAll('.entry:not([hidden]) h2')].map((node) => node.textContent).sort()"
        assert tab.evaluate(shown) == ["engines", "tiers"]

        def search(text: str, word: str = "") -> list[str]:
            found: list[str] = tab.evaluate(
                f"(() => {{ const [find, word] = ['find', 'word'].map((id) => document.getElementById(id));"
                f"find.value = {json.dumps(text)}; word.value = {json.dumps(word)};"
                f"find.dispatchEvent(new Event('input')); return {shown}; }})()")
            return found

        assert search("PENGUINS engines") == ["engines"]
        assert search("", "faster") == ["tiers"]
        assert search("nowhere-to-be-found") == []
        assert tab.evaluate("document.getElementById('none').hidden") is False
        assert tab.problems == []
        assert set(tab.addresses) == {site.index.as_uri()}


def test_publishing_again_keeps_what_is_there_and_refuses_what_is_not_a_site(results: Path, tmp_path: Path,
                                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "write_report", without_plots)
    out = tmp_path / "site"
    out.mkdir()
    (out / "mine.txt").write_text("precious")
    with pytest.raises(SpilloverError, match="is not empty and holds no site of the lab"):
        publish(results, out)
    assert [file.name for file in out.iterdir()] == ["mine.txt"]
    out = tmp_path / "new"
    publish(results, out)
    (out / "mine.txt").write_text("precious")
    assert publish(results / "other", out).reports == ("second",)
    assert {file.name for file in out.iterdir()} == {"index.html", "reports.json", "second", "mine.txt"}
    with pytest.raises(SpilloverError, match="no report could be made"):
        publish(results / "broken", tmp_path / "third")
    with pytest.raises(SpilloverError, match="holds no results"):
        publish(tmp_path, tmp_path / "fourth")
    with pytest.raises(SpilloverError, match="is no folder"):
        publish(tmp_path / "fifth", tmp_path / "fourth")


def test_a_pdf_is_printed_by_a_browser_or_refused_before_anything_is_read(tmp_path: Path,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if not Path(PROGRAMS[-1]).exists():
        done = CliRunner().invoke(main, ["lab", "report", str(tmp_path / "nothing"), "--pdf"])
        assert done.exit_code == 2
        assert "apt-get install chromium" in str(done.exception or done.output) + done.output
    monkeypatch.undo()
    false = tmp_path / "false"
    false.write_text("#!/bin/sh\necho cannot print >&2\n")
    false.chmod(0o755)
    page = tmp_path / "report.html"
    page.write_text("<details><summary>More</summary>inside</details>")
    with pytest.raises(SpilloverError, match=r"printed no PDF of .*: cannot print"):
        write_pdf(page, str(false))
    if find_chromium() is None:
        pytest.skip("no Chromium here; on Debian: apt-get install chromium")
    assert write_pdf(page, browser()).read_bytes().startswith(b"%PDF-")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["false", "report.html", "report.pdf"]


def test_the_commands_say_what_they_wrote(results: Path, tmp_path: Path) -> None:
    out = tmp_path / "b.svg"
    done = CliRunner().invoke(main, ["lab", "badge", str(results / "first"), "--arm", "host", "--out", str(out)])
    assert (done.exit_code, done.output) == (0, f"badge: {out}\n")
    assert "faster" in out.read_text()
