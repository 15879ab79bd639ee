"""Which blocks are worth storing in a lower tier: one class each."""

import importlib
from collections import OrderedDict
from typing import Protocol

from spillover.errors import SpilloverError


class AdmissionPolicy(Protocol):
    def admit(self, key: bytes, tier: str) -> bool:
        """Whether the block should be stored in that tier ("host", "disk", "remote"); asked each time it could be."""


class Always:
    def admit(self, key: bytes, tier: str) -> bool:
        return True


class SecondUse:
    """Stores a block in a tier when it leaves the one above for the second time: one-off prompts never get there."""

    def __init__(self, remembered: int = 1 << 16) -> None:
        self._remembered = remembered
        self._seen: OrderedDict[tuple[bytes, str], None] = OrderedDict()

    def admit(self, key: bytes, tier: str) -> bool:
        known = (key, tier) in self._seen
        self._seen[key, tier] = None
        self._seen.move_to_end((key, tier))
        if len(self._seen) > self._remembered:
            self._seen.popitem(last=False)
        return known


def admission_policy(name: str) -> AdmissionPolicy:
    """By its flag: always, second-use, or module:Class of one's own."""
    if name == "always":
        return Always()
    if name == "second-use":
        return SecondUse()
    module, _, cls = name.partition(":")
    try:
        policy = getattr(importlib.import_module(module), cls)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise SpilloverError(
            f"--spill-admission takes always, second-use or module:Class; '{name}' could not be made ({error})"
        ) from error
    if not callable(getattr(policy, "admit", None)):
        raise SpilloverError(f"--spill-admission {name}: the class has no method admit(key, tier)")
    return policy  # type: ignore[no-any-return]
