"""A static site of many reports: a searchable index, and a copy of every report. Nothing is loaded from the network,
and no server is needed: open the files, or put them on any web server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spillover.errors import SpilloverError
from spillover.lab.report import wording
from spillover.lab.report.badge import badge, sentence, title
from spillover.lab.report.data import Report, read_report
from spillover.lab.report.forest import TONES
from spillover.lab.report.page_template import embedded, render_page
from spillover.lab.report.write import write_report

LISTED = "reports.json"  # list of the site's reports; a folder without it is not a site of ours
COPIED = ("report.html", "REPORT.md", "summary.csv", "detailed.csv", "report.pdf")
DEEP = 3  # depth below the given folder that is searched for results


@dataclass(frozen=True)
class Site:
    index: Path
    reports: tuple[str, ...]
    left_out: tuple[str, ...]  # 'FOLDER: why' of each


def find_results(folder: Path) -> list[Path]:
    """Return the result folders in this folder, possibly itself."""
    if not folder.is_dir():
        raise SpilloverError(f"{folder} is no folder; give one that holds results of `spill lab run`")
    found = {path.parent for depth in range(DEEP + 1) for path in folder.glob("*/" * depth + "experiment.json")}
    if not found:
        raise SpilloverError(f"{folder} holds no results of an experiment; run one with: spill lab run NAME")
    return sorted(found)


def publish(folder: Path, out: Path) -> Site:
    """Write the site of all results below `folder` into `out`, which is new, empty or an earlier site."""
    found = find_results(folder)
    before = _listed(out)
    out.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    left_out: list[str] = []
    for each in found:
        name = "-".join(each.relative_to(folder).parts) or each.resolve().name
        try:
            report = read_report(each)
            write_report(each)
        except SpilloverError as error:
            left_out.append(f"{each}: {error}")
            continue
        place = out / name
        place.mkdir(exist_ok=True)
        for file in COPIED:
            if (each / file).is_file():
                shutil.copyfile(each / file, place / file)
        if (each / "plots").is_dir():
            shutil.copytree(each / "plots", place / "plots", dirs_exist_ok=True)
        (place / "badge.svg").write_text(badge(report), encoding="utf-8")
        entries.append(_entry(name, report, (each / "REPORT.md").read_text(encoding="utf-8")))
    if not entries:
        raise SpilloverError(f"no report could be made of {folder}: {left_out[0]}")
    names = [entry["name"] for entry in entries]
    for gone in set(before) - set(names):
        shutil.rmtree(out / gone, ignore_errors=True)
    entries.sort(key=lambda entry: str(entry["date"]), reverse=True)
    (out / LISTED).write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")
    index = out / "index.html"
    index.write_text(_index(entries), encoding="utf-8")
    return Site(index, tuple(names), tuple(left_out))


def _listed(out: Path) -> list[str]:
    """Return the reports that the site had; refuse a folder with other contents."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return []
    try:
        names = json.loads((out / LISTED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        names = None
    if not isinstance(names, list):
        raise SpilloverError(f"{out} is not empty and holds no site of the lab; give another folder with --out")
    return [name for name in names if isinstance(name, str) and Path(name).name == name]


def _entry(name: str, report: Report, text: str) -> dict[str, Any]:
    judged = wording.judged(report)
    facts = dict(wording.top_facts(report))
    return {
        "name": name, "title": report.name, "about": report.about, "date": facts.get("measured", ""),
        "on": facts.get("on", ""), "metric": title(report),
        "verdicts": [{"text": sentence(report, verdict), "workload": verdict.workload, "word": verdict.verdict,
                      "tone": TONES[verdict.verdict]} for verdict in judged],
        "words": sorted({verdict.verdict for verdict in judged}),
        "warning": " ".join(wording.warnings(report)),
        "search": f"{name} {text}".lower(),
    }


def _index(entries: Sequence[dict[str, Any]]) -> str:
    words = [word for word in wording.VERDICTS if any(word in entry["words"] for entry in entries)]
    return render_page("site.html", script="site.js", entries=entries, words=words,
                       data=embedded({entry["name"]: entry["search"] for entry in entries}))
