"""`spill pull` with a separate cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from spillover.cli.main import main


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILLOVER_CACHE", str(tmp_path))


def test_an_empty_cache_says_what_to_type() -> None:
    result = CliRunner().invoke(main, ["pull", "--list"])
    assert result.exit_code == 0
    assert "spill pull" in result.stdout


@pytest.mark.parametrize(("arguments", "says"), [
    (["--list", "--remove"], "contradict"),
    (["--remove"], "needs the name"),
    (["--verify"], "needs the name"),
    (["--list", "name"], "every model"),
    (["--remove", "no-such-model"], "no-such-model"),
    (["./no/such/folder"], "./no/such/folder"),
])
def test_what_cannot_be_done_is_said_in_one_line(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(main, ["pull", *arguments])
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
