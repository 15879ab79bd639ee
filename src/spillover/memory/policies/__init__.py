"""Eviction policies: one class each. A policy sees ids, never the blocks behind them."""

from spillover.memory.policies.lru import LRU
from spillover.memory.policies.protocol import EvictionPolicy

__all__ = ["LRU", "EvictionPolicy"]
