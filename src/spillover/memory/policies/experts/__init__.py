"""Policies that choose which experts stay on the device, one class each. A policy sees ids and steps, never weights."""

from spillover.memory.policies.experts.belady import Belady
from spillover.memory.policies.experts.lfru import LFRU
from spillover.memory.policies.experts.lru import LRUQuota
from spillover.memory.policies.experts.named import expert_policy
from spillover.memory.policies.experts.next_layer import NextLayer
from spillover.memory.policies.experts.protocol import ExpertPolicy
from spillover.memory.policies.experts.static import Static

__all__ = ["LFRU", "Belady", "ExpertPolicy", "LRUQuota", "NextLayer", "Static", "expert_policy"]
