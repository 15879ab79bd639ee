"""Numbers in README and docs that name a result file equal those in the file."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
MADE = ("benchmarks/results/w1.json",)  # files that a command in the pages would write


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("doc_numbers", ROOT / "benchmarks" / "doc_numbers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


doc_numbers = load()


def test_every_number_is_the_one_in_its_file_and_every_table_has_one() -> None:
    texts = {page.name: page.read_text() for page in doc_numbers.pages()}
    found = {name: [*doc_numbers.checked(text)[1], *doc_numbers.unmarked(text)] for name, text in texts.items()}
    assert not {name: list(map(str, wrong)) for name, wrong in found.items() if wrong}, \
        "make tables puts what the files say in their place; its script says how a number is marked"
    assert len(doc_numbers.MARKED.findall("".join(texts.values()))) >= 400
    assert len(doc_numbers.ROWS.findall("".join(texts.values()))) >= 10


def test_what_pages_name_is_there() -> None:
    named = {(page.name, path) for page in doc_numbers.pages()
             for path in re.findall(r"benchmarks/[\w/.-]+\.(?:py|sh|json)", page.read_text())}
    assert [each for each in sorted(named) if not (ROOT / each[1]).exists() and each[1] not in MADE] == []


def test_every_script_has_a_reason_not_to_be_an_experiment() -> None:
    section = (ROOT / "docs" / "benchmarks.md").read_text().partition("\n## Scripts\n")[2]
    cells = re.findall(r"^\| (`.+?`) \|", section, re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    scripts = [path.stem for path in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in path.read_text()]
    assert sorted(named) == sorted(scripts)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "a.json").write_text(json.dumps({
        "value": 12.5, "runs": [1, 3, 8], "odd name": {"x": 4},
        "kinds": [{"name": "a", "rate": 1, "set": {"n": 8}}, {"name": "b", "rate": 2000, "set": {"n": 8}}, {}]}))
    (tmp_path / "b.json").write_text(json.dumps({"value": 25}))
    return tmp_path


@pytest.mark.parametrize(("where", "form", "found"), [
    ("value", ".1f", "12.5"), ("1/value", ".2f", "0.08"), ("value*1000", ",.0f", "12,500"), ("runs", ".0f", "3"),
    ("kinds[name=b].rate", ",.0f", "2,000"), ("kinds[0].rate", ",.0f", "1"), ("runs.max", ".0f", "8"),
    ("runs.sum/value", ".2f", "0.96"), ("kinds[set.n=8].rate.sum", ".0f", "2001"), ("[odd name].x", ".0f", "4"),
    ("kinds[set.n=8][name=a].rate", ".0f", "1"), ("value/b.json:value*100", ".0f", "50"), ("value", "+.1f", "+12.5"),
])
def test_a_number_that_differs_is_told_and_written_anew(where: str, form: str, found: str, results: Path) -> None:
    text = f"one line\n| it does 77<!--a.json {where} {form}--> tok/s |\n"
    made, wrong = doc_numbers.checked(text, results)
    assert made == text.replace("77", found)
    assert [(each.line, each.written) for each in wrong] == [(2, "77")]
    assert found in wrong[0].found
    assert doc_numbers.checked(made, results) == (made, [])


@pytest.mark.parametrize(("marked", "words"), [
    ("7<!--c.json value .0f-->", "No such file"), ("7<!--a.json wrong .0f-->", "there is no one 'wrong'"),
    ("7<!--a.json kinds[name=c].rate .0f-->", r"there is no one '\[name=c\]'"),
    ("7<!--a.json kinds[set.n=8].rate .0f-->", "is no number"),
    ("7<!--a.json kinds .0f-->", "is no number"), ("seven<!--a.json value .0f-->", "no number before it"),
    ("7<!--a.json value-->", "or no format"),
])
def test_a_mark_that_leads_nowhere_is_told(marked: str, words: str, results: Path) -> None:
    made, (wrong,) = doc_numbers.checked(marked, results)
    assert made == marked
    with pytest.raises(ValueError, match=words):
        raise ValueError(str(wrong))


TABLE = "| what | speed |\n|---|---|\n"


@pytest.mark.parametrize(("comment", "rows"), [
    ("<!--rows a.json kinds[set.n=8]: {name} | {rate ,.0f} tok/s-->", "| a | 1 tok/s |\n| b | 2,000 tok/s |\n"),
    ("<!--rows a.json n=1,2: {n} | {runs[{n}] .1f} s-->", "| 1 | 3.0 s |\n| 2 | 8.0 s |\n"),
    ("<!--rows a.json n=0,2: {n} | {kinds[{n}].rate .0f?} us-->", "| 0 | 1 us |\n| 2 |  |\n"),
])
def test_rows_of_a_table_are_made(comment: str, rows: str, results: Path) -> None:
    made, wrong = doc_numbers.checked(f"{comment}\n{TABLE}| a | 5 |\n\nend", results)
    assert made == f"{comment}\n{TABLE}{rows}\nend"
    assert len(wrong) == 2
    assert doc_numbers.checked(made, results) == (made, [])
    assert doc_numbers.unmarked(made) == []


@pytest.mark.parametrize(("cell", "measured"), [
    ("12 tok/s", True), ("faster, 1.2x (1.1 .. 1.3)", True), ("3.5", True), ("1, 2", True), ("4 (7%)", True),
    ("**5**", True), ("7<!--a.json value .0f--> ms", False), ("7<!--a.json value .0f--> of 8 ms", False),
    ("7 ms<!--no file: told-->", False), ("within 30 s", False), ("400 `too_long`", False),
    ("128 x 128", False), ("`--steps 4`", False), ("", False), ("off", False),
])
def test_a_table_with_a_measured_number_and_no_file_is_told(cell: str, measured: bool) -> None:
    text = f"words\n\n{TABLE}| 5 | {cell} |\n"
    assert [each.line for each in doc_numbers.unmarked(text)] == [5] * measured
    for free in (text.replace("| what", "<!--no file: told-->\n| what"), text.replace("| speed", "| default"),
                 text.replace("| speed", "| speed<!--no file: told-->"), f"```\n{text}```\n",
                 text.replace("| 5 |", "| 5<!--no file: told--> |")):
        assert doc_numbers.unmarked(free) == []
