"""The benchmark of branches runs, and where passes take long the engine chooses branches by itself."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from support.models.text_model import write_text_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_branches_are_chosen_where_a_pass_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text_model(tmp_path, spread=0.05, layers=6)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    measured = importlib.import_module("draft_branches").measured
    chain = measured(str(tmp_path), "int4", 6, 0, 2, 40)
    always = measured(str(tmp_path), "int4", 6, 3, 2, 40)
    chosen = measured(str(tmp_path), "int4", 6, 3, 2, 40, 0.1)
    assert chain["branches"] == 0
    assert 0 < always["branches_accepted"] < always["branches"]
    assert always["tokens_per_pass"] > chain["tokens_per_pass"]
    assert chosen["branches"] > 0
    assert chain["answers"] == always["answers"] == chosen["answers"]
    assert chosen["tokens_per_second"] > 10
