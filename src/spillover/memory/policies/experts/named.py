"""Expert policies by their name in --policy."""

from __future__ import annotations

from spillover.errors import SpilloverError
from spillover.memory.policies.custom import make_custom
from spillover.memory.policies.experts.checked import checked
from spillover.memory.policies.experts.lfru import LFRU
from spillover.memory.policies.experts.lru import LRUQuota
from spillover.memory.policies.experts.next_layer import NextLayer
from spillover.memory.policies.experts.protocol import ExpertPolicy
from spillover.memory.policies.experts.static import Static

NAMES: dict[str, type[ExpertPolicy]] = {"static": Static, "lru": LRUQuota, "lfru": LFRU, "next-layer": NextLayer}
METHODS = ("on_load", "on_phase", "on_route", "worth", "prefetch")


def expert_policy(name: str) -> ExpertPolicy:
    """Create the policy that --policy names: one of NAMES, or a user's module:Class."""
    if name in NAMES:
        return NAMES[name]()
    if ":" not in name:
        raise SpilloverError(f"--policy takes {', '.join(NAMES)} or module:Class; got '{name}'")
    return checked(make_custom(name, f"--policy {name}", {method: method for method in METHODS}, "--policy"), name)
