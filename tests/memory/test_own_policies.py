"""Policies of the user's own: every mistake in them is reported in a sentence that names their flag."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from spillover.errors import SpilloverError
from spillover.memory.policies.admission import admission_policy
from spillover.memory.policies.experts import ExpertPolicy, LRUQuota, NextLayer, expert_policy
from spillover.memory.policies.experts.protocol import GuessingPolicy

HERE = __name__
EXPERTS = 4


class DividesByZero:
    def __init__(self) -> None:
        self.share = 1 // 0


class Leaves:
    def __init__(self) -> None:
        sys.exit(3)


class Answers(LRUQuota):
    """A policy that returns fixed answers."""

    worths: Any = (1.0,) * EXPERTS
    wanted: Any = ()

    def worth(self, layer: int) -> Any:
        return self.worths

    def prefetch(self, layer: int) -> Any:
        return self.wanted


class Guesses(NextLayer):
    pass


class Raises(LRUQuota):
    def on_route(self, step: int, layer: int, experts: Sequence[int]) -> None:
        raise KeyError(layer)


class OnlyHost:
    """Admits blocks to host memory, and raises KeyError for any other tier."""

    def admit(self, key: bytes, tier: str) -> bool:
        return {"host": True}[tier]


def loaded(cls: str) -> ExpertPolicy:
    policy = expert_policy(f"{HERE}:{cls}")
    policy.on_load(2, EXPERTS, 2)
    return policy


@pytest.mark.parametrize("cls", ["DividesByZero", "Leaves", "Missing"])
def test_a_class_that_cannot_be_made_is_refused_by_its_flag(cls: str) -> None:
    with pytest.raises(SpilloverError, match=rf"--policy {HERE}:{cls} could not be made(:| \()\w*"):
        expert_policy(f"{HERE}:{cls}")
    with pytest.raises(SpilloverError, match=rf"--spill-admission .*'{HERE}:{cls}' could not be made(:| \()\w*"):
        admission_policy(f"{HERE}:{cls}")


@pytest.mark.parametrize("worths", [None, 3, "1234", (), (1.0,), (1.0,) * 5, (1.0, "x", 1.0, 1.0), {0: 1.0},
                                    (float("nan"),) * EXPERTS])
def test_worth_is_a_number_for_every_expert(worths: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "worths", worths)
    with pytest.raises(SpilloverError, match=rf"--policy {HERE}:Answers: its method worth is to return 4 numbers.*"
                                             r"for layer 1 it returned ."):
        loaded("Answers").worth(1)


@pytest.mark.parametrize("wanted", [None, [-1, 9999], ["x"], "0", [1.5], {0: 1}])
def test_what_is_prefetched_is_an_expert(wanted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "wanted", wanted)
    with pytest.raises(SpilloverError, match=rf"--policy {HERE}:Answers: its method prefetch .* 0 to 3; for layer 0"):
        loaded("Answers").prefetch(0)


def test_arrays_will_do_and_infinity_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "worths", np.array([1, 2, np.inf, -np.inf]))
    monkeypatch.setattr(Answers, "wanted", np.array([3, 0]))
    policy = loaded("Answers")
    assert list(policy.worth(0)) == [1, 2, float("inf"), float("-inf")]
    assert list(policy.prefetch(0)) == [3, 0]


def test_a_method_that_raises_is_named() -> None:
    with pytest.raises(SpilloverError, match=rf"--policy {HERE}:Raises: its method on_route failed \(KeyError: 1\)"):
        loaded("Raises").on_route(0, 1, [2])


def test_only_who_guesses_is_told_of_guesses() -> None:
    assert not isinstance(loaded("Answers"), GuessingPolicy)
    policy = loaded("Guesses")
    assert isinstance(policy, GuessingPolicy)
    policy.on_guess(1, [3])
    assert list(policy.prefetch(1)) == [3]


def test_those_of_this_package_are_not_checked() -> None:
    assert type(expert_policy("lru")) is LRUQuota


def test_an_admission_that_fails_admits_nothing_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    policy = admission_policy(f"{HERE}:OnlyHost")
    with caplog.at_level(logging.WARNING, "spillover.memory"):
        assert [policy.admit(bytes([i]), tier) for i, tier in enumerate(("host", "disk", "remote", "host"))] == [
            True, False, False, True]
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"--spill-admission {HERE}:OnlyHost: admit failed (KeyError: 'disk')" in line
