"""The KV blocks of a draft model: a separate pool with a prefix cache of the draft model's KV.

The tokens in a request's blocks are recorded: rejected draft tokens are found by comparison with the request's tokens,
and overwritten. Only whole blocks of known tokens enter the prefix cache, under the request's `cache_salt`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spillover.engine.requests.token_ids import TokenIds
from spillover.engine.speculation.drafters.runner_drafter import Tables
from spillover.memory.kv.kv_cache import KVCache

if TYPE_CHECKING:
    from spillover.engine.requests.request import Request


@dataclass
class _Held:
    """The contents of a request's blocks."""

    tokens: TokenIds = field(default_factory=lambda: array("i"))  # tokens whose KV is in the blocks, with draft tokens
    committed: int = 0  # number of leading tokens in blocks that the prefix cache may share


class OwnBlocks:
    def __init__(self, kv: KVCache, max_model_len: int) -> None:
        self.kv = kv
        self._max_model_len = max_model_len  # maximum sequence length of the draft model
        self._held: OrderedDict[str, _Held] = OrderedDict()  # by request id, least recently drafted for first
        self._drafting: set[str] = set()  # ids of the requests of the current round

    def reserve(self, request: Request, num_tokens: int) -> int:
        """Allocate blocks for `num_tokens` positions, at most the draft model's maximum length; release requests that
        are not in this round if necessary. Return the number of positions, 0 if the request cannot be drafted for."""
        id = request.request_id
        if num_tokens > self._max_model_len:
            num_tokens = self._max_model_len
        if num_tokens < len(request.token_ids):
            return 0
        if id not in self._held:
            self._admit(request)
        self._held.move_to_end(id)
        self._drafting.add(id)
        self._commit(request)
        while not self.kv.extend(id, num_tokens):
            idle = next((other for other in self._held if other not in self._drafting), None)
            if idle is None:
                self._drafting.discard(id)
                return 0
            self._release(idle)
        return num_tokens

    def num_computed(self, request: Request) -> int:
        return len(self._held[request.request_id].tokens)

    def num_known(self, request: Request) -> int:
        """Return how many tokens have KV or would get it from the prefix cache; some may be rejected draft tokens."""
        held = self._held.get(request.request_id)
        return len(held.tokens) if held is not None else self.kv.match(request.token_ids, request.cache_salt)

    def tables(self, request: Request) -> Tables:
        return tuple(tuple(self.kv.table(request.request_id, group)) for group in range(len(self.kv.windows)))

    def drafted(self, request: Request, num_tokens: int, tokens: Sequence[int]) -> None:
        id = request.request_id
        self._drafting.discard(id)
        self._held[id].tokens = (request.token_ids + array("i", tokens))[:num_tokens]

    def end(self, request: Request) -> None:
        if request.request_id in self._held:
            self._release(request.request_id)

    def forget(self) -> None:
        """Drop all requests and prefixes, because the memory of the blocks is about to be freed."""
        for id in list(self._held):
            self._release(id)
        self.kv.reset_prefix_cache()

    def check(self) -> None:
        """Assert the invariants that hold between two rounds."""
        self.kv.check()
        assert not self._drafting
        for id, held in self._held.items():
            assert held.committed <= len(held.tokens) <= len(self.kv.table(id)) * self.kv.block_size

    def _admit(self, request: Request) -> None:
        covered = self.kv.admit(request.request_id, request.token_ids, request.cache_salt)
        self.kv.count_query(request.request_id)
        self._held[request.request_id] = _Held(request.token_ids[:covered], covered)

    def _commit(self, request: Request) -> None:
        """Drop tokens that the request did not get from the record, and add whole blocks to the prefix cache."""
        held, known, id = self._held[request.request_id], request.token_ids, request.request_id
        kept, most = held.committed, min(len(held.tokens), len(known) - 1)
        while kept < most and held.tokens[kept] == known[kept]:
            kept += 1
        del held.tokens[kept:]
        whole = kept // self.kv.block_size * self.kv.block_size
        if whole > held.committed:
            self.kv.commit(id, known, whole)
            held.committed = whole

    def _release(self, id: str) -> None:
        del self._held[id]
        self.kv.release(id)
