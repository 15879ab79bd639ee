"""Numbers in README and docs that name a result file are what that file says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("doc_numbers", ROOT / "benchmarks" / "doc_numbers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


doc_numbers = load()


def test_every_marked_number_is_the_one_in_its_file() -> None:
    pages = {page: doc_numbers.checked(page.read_text())[1] for page in doc_numbers.pages()}
    assert not {str(page): list(map(str, wrong)) for page, wrong in pages.items() if wrong}, \
        "python benchmarks/doc_numbers.py --write puts what the files say in their place"
    assert len(doc_numbers.MARKED.findall((ROOT / "README.md").read_text())) >= 15


@pytest.mark.parametrize(("where", "form", "found"), [
    ("value", ".1f", "12.5"), ("1/value", ".2f", "0.08"), ("value*1000", ",.0f", "12,500"), ("runs", ".0f", "3"),
    ("kinds[name=b].rate", ",.0f", "2,000"), ("kinds[0].rate", ",.0f", "1"),
])
def test_a_number_that_differs_is_told_and_written_anew(where: str, form: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({
        "value": 12.5, "runs": [1, 3, 7], "kinds": [{"name": "a", "rate": 1}, {"name": "b", "rate": 2000}, {}]}))
    text = f"one line\n| it does 77<!--a.json {where} {form}--> tok/s |\n"
    made, wrong = doc_numbers.checked(text, tmp_path)
    assert made == text.replace("77", found)
    assert [(each.line, each.written, each.found) for each in wrong] == [(2, "77", found)]
    assert doc_numbers.checked(made, tmp_path) == (made, [])


@pytest.mark.parametrize(("marked", "words"), [
    ("7<!--b.json value .0f-->", "No such file"), ("7<!--a.json wrong .0f-->", "there is no one 'wrong'"),
    ("7<!--a.json kinds[name=c].rate .0f-->", r"there is no one '\[name=c\]'"),
    ("7<!--a.json kinds .0f-->", "is no number"), ("seven<!--a.json value .0f-->", "no number before it"),
    ("7<!--a.json value-->", "or no format"),
])
def test_a_mark_that_leads_nowhere_is_told(marked: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"value": 1, "kinds": [{"name": "a"}]}))
    made, (wrong,) = doc_numbers.checked(marked, tmp_path)
    assert made == marked
    with pytest.raises(ValueError, match=words):
        raise ValueError(str(wrong))
