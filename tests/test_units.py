"""Sizes as users type them: clear ones are parsed, ambiguous ones are rejected with a question."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from spillover.cli.main import main
from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError
from spillover.plan.fit import size_flag
from spillover.units import parse_budget, parse_bytes


@pytest.mark.parametrize(("text", "says"), [
    ("1", "--gpu-memory 1 is read as 1 bytes; for a share of the tier write 100%, for a size 8GB or 512MiB"),
    ("0.9", "--gpu-memory 0.9 is read as 0.9 bytes; for a share of the tier write 90%"),
    ("24", "--gpu-memory 24 is read as 24 bytes"),
    ("banana", "--gpu-memory 'banana' is not a size; write one like 8GB"),
    ("150%", "--gpu-memory 150% is no share of a tier"),
    ("0%", "--gpu-memory 0% is no share"),
    ("0GB", "--gpu-memory must be above 0"),
    ("-3GB", "--gpu-memory '-3GB' is not a size"),
])
def test_what_is_no_budget_is_said_with_its_flag_and_the_units(text: str, says: str) -> None:
    with pytest.raises(SpilloverError) as error:
        EngineConfig(gpu_memory=text)
    assert says in str(error.value)
    if "size" in says:
        assert "GB is 1000**3 bytes, GiB or G 1024**3" in str(error.value)
    with pytest.raises(SpilloverError, match="--host-memory"):
        EngineConfig(host_memory=text)


def test_sizes_and_shares() -> None:
    assert parse_budget("4GB", "--x") == 4 * 10**9
    assert parse_budget("4g", "--x") == parse_budget("4GiB", "--x") == 4 << 30
    assert parse_budget("90%", "--x", 1000) == 900
    assert parse_budget(" 12.5 % ", "--x", 1000) == 125
    assert parse_budget("5000000", "--x") == 5_000_000
    EngineConfig(gpu_memory="90%", host_memory="50%")


@given(st.integers(4096, 10**13))
def test_a_size_that_is_told_can_be_typed_and_is_in_binary_units(count: int) -> None:
    assert parse_bytes(size_flag(count)) >= count - 1
    assert parse_bytes(size_flag(count, up=False)) <= count
    assert re.fullmatch(r"[0-9.]+(B|MiB|GiB)", size_flag(count))


def test_the_help_says_what_the_units_are() -> None:
    text = " ".join(CliRunner().invoke(main, ["plan", "--help"]).stdout.split())
    assert "GB is 1000**3 bytes, GiB or G 1024**3" in text
    assert "90%" in text
