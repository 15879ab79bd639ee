"""Eviction policies, one class each. A policy sees block ids, never the contents of blocks."""

from spillover.memory.policies.lru import LRU
from spillover.memory.policies.protocol import EvictionPolicy

__all__ = ["LRU", "EvictionPolicy"]
