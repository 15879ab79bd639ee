"""Decides whether a waiting request waits for a running one that is computing the same prefix.

Requests that arrive together (few-shot prompts of many questions, an agent's branches) would each compute their shared
prefix, as it is not in the prefix cache yet. So one computes it, and the others find it there a step or two later.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from spillover.engine.requests.request import Request
from spillover.engine.requests.token_ids import TokenIds
from spillover.memory.kv.kv_cache import KVCache

LEAST = 128  # minimum shared tokens worth waiting for; they must also be half of what the request has to compute


def waits_for_prefix(request: Request, running: Iterable[Request], kv: KVCache) -> bool:
    """Return whether at least half of what a request has to compute is a prefix that a running request will cache."""
    if not kv.prefix_caching or request.computes_all or request.params.kv_coming:
        return False
    size = kv.block_size
    cached: int | None = None
    for leader in running:
        ready = kv.num_ready(leader.request_id) * size
        if leader.num_prompt - ready < LEAST or leader.cache_salt != request.cache_salt:
            continue
        shared = min(common_tokens(leader.token_ids, request.token_ids), len(request.token_ids) - 1) // size * size
        if shared - ready < LEAST:
            continue
        cached = kv.match(request.token_ids, request.cache_salt) if cached is None else cached
        known = max(ready, cached)
        if shared - known >= max(LEAST, (request.num_tokens - known) / 2):
            return True
    return False


def common_tokens(one: TokenIds, other: TokenIds) -> int:
    """Return the length of the common prefix of two prompts."""
    length = min(len(one), len(other))
    if not length or one[0] != other[0]:
        return 0
    differ = np.flatnonzero(np.frombuffer(one, np.intc, length) != np.frombuffer(other, np.intc, length))
    return int(differ[0]) if len(differ) else length
