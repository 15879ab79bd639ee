"""The policy and the cache of expert slots that a plan requires, on any device."""

from __future__ import annotations

from spillover.memory.experts import ExpertCache
from spillover.memory.policies.experts import Static, expert_policy
from spillover.memory.policies.experts.protocol import ExpertPolicy
from spillover.plan.placement import WeightPlan


def chosen_policy(placement: WeightPlan, name: str) -> ExpertPolicy:
    """Return the policy for a placement: the named one for paged experts; pinned experts stay, and with the strategy
    demand the least recently used expert is evicted."""
    if placement.strategy == "pinned":
        return Static(placement.pinned)
    return expert_policy(name if placement.strategy == "experts" else "lru")


def filled_cache(placement: WeightPlan, experts: int, policy: ExpertPolicy) -> ExpertCache:
    """Make a cache in which the slots of every layer hold its first experts, in order."""
    cache = ExpertCache(len(placement.slot_layers), experts, placement.quota, policy)
    for layer in range(cache.layers):
        for expert in range(cache.quota):
            cache.assign(layer, expert, demand=False)
    return cache
