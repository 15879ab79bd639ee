"""`spill doctor --bits`: kernels whose bits do not depend on the number of rows pass, and all others are named."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from spillover.cli.main import main
from spillover.kernels import bits


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "FEW", (1, 2, 7))
    monkeypatch.setattr(bits, "MORE", dict.fromkeys(bits.MORE, (20, 33)))
    monkeypatch.setattr(bits, "LONGEST", dict.fromkeys(bits.LONGEST, 300))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_kernel_has_the_same_bits(device: str) -> None:
    told: list[tuple[int, int]] = []
    checks = bits.check_bits(device, lambda done, total: told.append((done, total)))
    assert {check.differs for check in checks} == {None}
    assert {check.rows for check in checks} == {(1, 2, 7, 20, 33)}
    assert len(checks) == (9 if device == "cpu" else 11)
    assert told == [(done, len(told)) for done in range(1, len(told) + 1)]


def test_a_kernel_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = bits.linear

    def depends_on_rows(x: Tensor, w: bits.Linear) -> Tensor:
        return linear(x, w) if len(x) != 7 else linear(x, w) * (1 + torch.finfo(x.dtype).eps)

    monkeypatch.setattr(bits, "linear", depends_on_rows)
    checks = bits.check_bits("cpu")
    assert {check.kernel.split()[0]: check.differs for check in checks}["product"] == 7
    assert all(check.differs is None for check in checks if not check.kernel.startswith("product"))
    result = CliRunner().invoke(main, ["doctor", "--bits"], standalone_mode=False)
    assert result.exit_code == 1
    assert "differ, first with 7 rows" in result.stdout
    found = json.loads(CliRunner().invoke(main, ["doctor", "--bits", "--json"]).stdout)
    assert [check["differs"] for check in found["cpu"]][:4] == [7] * 4
