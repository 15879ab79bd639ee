"""A wrapper that checks every result of a user's expert policy: errors name its flag, class and method, instead of
surfacing later elsewhere."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeVar

from spillover.errors import SpilloverError
from spillover.memory.policies.custom import failure
from spillover.memory.policies.experts.protocol import ExpertPolicy, GuessingPolicy

T = TypeVar("T")


def checked(policy: ExpertPolicy, name: str) -> ExpertPolicy:
    """Wrap a policy so that errors name it. `name`: the policy as given to --policy."""
    # The engine computes guesses for every policy with on_guess, so the wrapper has it only if the policy does.
    return CheckedGuessing(policy, name) if isinstance(policy, GuessingPolicy) else Checked(policy, name)


class Checked:
    def __init__(self, policy: ExpertPolicy, name: str) -> None:
        self._policy: Any = policy
        self._name = name
        self._experts = 0

    def on_load(self, layers: int, experts: int, quota: int) -> None:
        self._experts = experts
        self._call("on_load", layers, experts, quota)

    def on_phase(self, phase: str) -> None:
        self._call("on_phase", phase)

    def on_route(self, step: int, layer: int, experts: Sequence[int]) -> None:
        self._call("on_route", step, layer, list(experts))  # a copy, which the policy may keep or change

    def worth(self, layer: int) -> Sequence[float]:
        found = self._call("worth", layer)
        worth = _numbers(found, float)
        if worth is None or len(worth) != self._experts or any(map(math.isnan, worth)):
            raise self._refusal("worth", layer, f"{self._experts} numbers, one for each expert", found)
        return worth

    def prefetch(self, layer: int) -> Sequence[int]:
        found = self._call("prefetch", layer)
        experts = _numbers(found, operator.index)
        if experts is None or not all(0 <= expert < self._experts for expert in experts):
            raise self._refusal("prefetch", layer, f"experts by their numbers, 0 to {self._experts - 1}", found)
        return experts

    def _call(self, method: str, *arguments: object) -> Any:
        try:
            return getattr(self._policy, method)(*arguments)
        except Exception as error:
            raise SpilloverError(f"--policy {self._name}: its method {method} failed ({failure(error)})") from error

    def _refusal(self, method: str, layer: int, wanted: str, found: object) -> SpilloverError:
        text = " ".join(reprlib.repr(found).split())
        if isinstance(found, Sequence):  # reprlib shortens it, so that its length is not visible
            text += f", of length {len(found)}"
        return SpilloverError(f"--policy {self._name}: its method {method} is to return {wanted}; for layer {layer} it "
                              f"returned {text}")


class CheckedGuessing(Checked):
    def on_guess(self, layer: int, experts: Sequence[int]) -> None:
        self._call("on_guess", layer, list(experts))


def _numbers(found: Any, number: Callable[[Any], T]) -> list[T] | None:
    """Convert any iterable of numbers (a tuple, an array) to a list; None if it is not one."""
    if isinstance(found, (str, bytes, Mapping, Set)):  # iterating over these would not give the intended numbers
        return None
    try:
        return [number(value) for value in found]
    except Exception:
        return None
