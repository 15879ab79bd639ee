"""Links between documents, and to documents from the code, lead to files and headings that exist."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def tracked(*patterns: str) -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: its files cannot be listed")
    return subprocess.check_output(["git", "ls-files", *patterns], cwd=ROOT, text=True).split()


@cache
def anchors(path: Path) -> frozenset[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", FENCE.sub("", path.read_text()), re.MULTILINE)
    texts = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return frozenset(re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-") for text in texts)


def broken(start: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (start / path).resolve() if path else start
    return not target.exists() or bool(anchor and target.suffix == ".md" and anchor not in anchors(target))


def test_links_between_documents() -> None:
    found = []
    for name in tracked("*.md"):
        document = ROOT / name
        for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", document.read_text())):
            start = document if link.startswith("#") else document.parent
            if not link.startswith(("http:", "https:", "mailto:")) and broken(start, link):
                found.append(f"{name}: {link}")
    assert found == []


def test_documents_that_the_code_names() -> None:
    found = []
    for name in tracked("src/*.py", "src/*.html", "src/*.js", "src/*.yaml", "benchmarks/*.py"):
        for link in re.findall(r"docs/[\w-]+\.md(?:#[\w-]+)?", (ROOT / name).read_text()):
            if broken(ROOT, link):
                found.append(f"{name}: {link}")
    assert found == []


def test_a_broken_link_is_found() -> None:
    assert [broken(ROOT, link) for link in ("docs/nowhere.md", "README.md#nowhere")] == [True, True]
    assert [broken(ROOT, "README.md#the-lab"), broken(ROOT / "README.md", "#the-lab")] == [False, False]
