"""The policy and the cache of expert slots that a plan asks for, on either device."""

from __future__ import annotations

from spillover.memory.experts import ExpertCache
from spillover.memory.policies.experts import Static, expert_policy
from spillover.memory.policies.experts.protocol import ExpertPolicy
from spillover.plan.placement import WeightPlan


def chosen_policy(placement: WeightPlan, name: str) -> ExpertPolicy:
    """Return the policy that serves: only what is paged has a choice; what is pinned stays, and on demand the one
    unused for longest goes."""
    if placement.strategy == "pinned":
        return Static(placement.pinned)
    return expert_policy(name if placement.strategy == "experts" else "lru")


def filled_cache(placement: WeightPlan, experts: int, policy: ExpertPolicy) -> ExpertCache:
    """Make a cache in which the first experts of every layer lie in its slots, in order."""
    cache = ExpertCache(len(placement.slot_layers), experts, placement.quota, policy)
    for layer in range(cache.layers):
        for expert in range(cache.quota):
            cache.take(layer, expert, asked=False)
    return cache
