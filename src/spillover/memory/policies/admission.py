"""Admission policies, one class each: which blocks are worth storing in a lower tier."""

import logging
from collections import OrderedDict
from typing import Protocol

from spillover.memory.policies.custom import failure, make_custom

log = logging.getLogger("spillover.memory")


class AdmissionPolicy(Protocol):
    def admit(self, key: bytes, tier: str) -> bool:
        """Return whether to store the block in that tier ("host", "pool", "disk", "remote"); called whenever it could
        be stored."""


class Always:
    def admit(self, key: bytes, tier: str) -> bool:
        return True


class SecondUse:
    """A policy that stores a block when it leaves the tier above for the second time, so never one-off prompts."""

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


class CustomAdmission:
    """A wrapper of a user's policy: a block for which the policy fails is not stored, and the engine continues."""

    def __init__(self, policy: AdmissionPolicy, name: str) -> None:
        self._policy = policy
        self._name = name
        self._warned = False

    def admit(self, key: bytes, tier: str) -> bool:
        try:
            return bool(self._policy.admit(key, tier))
        except Exception as error:
            if not self._warned:  # admit() is called for every block: warn only once
                self._warned = True
                log.warning("--spill-admission %s: admit failed (%s); blocks for which it fails are not stored",
                            self._name, failure(error))
            return False


def admission_policy(name: str) -> AdmissionPolicy:
    """Create the policy that --spill-admission names: always, second-use, or a user's module:Class."""
    if name == "always":
        return Always()
    if name == "second-use":
        return SecondUse()
    problem = f"--spill-admission takes always, second-use or module:Class; '{name}'"
    return CustomAdmission(make_custom(name, problem, {"admit": "admit(key, tier)"}, "--spill-admission"), name)
