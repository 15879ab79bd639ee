"""Turns decode items of a step into items that verify drafts, within the room that the step's other items leave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from spillover.engine.speculation.speculator import Candidate, Speculator
from spillover.engine.step import Phase, StepItem
from spillover.memory.kv.kv_cache import KVCache

if TYPE_CHECKING:
    from spillover.engine.requests.request import Request
    from spillover.engine.scheduler_config import SchedulerConfig


class DraftItems:
    def __init__(self, config: SchedulerConfig, kv: KVCache, speculator: Speculator) -> None:
        self._config = config
        self._kv = kv
        self._speculator = speculator

    def add(self, items: list[StepItem], requests: Mapping[int, Request], num_running: int) -> None:
        """Add drafts to the items of requests whose newest token is known. Drafts leave one free block for each of the
        `num_running` requests, which may need it."""
        decoding = [index for index, item in enumerate(items) if item.phase is Phase.DECODE]
        places, candidates = [], []
        for index in decoding:
            request = requests[items[index].id]
            most = self._most(request) if request.in_flight == 1 else 0
            if most > 0 and self._config.drafts_in_kv:
                most = self._room(request, items[index].end, most, num_running)
            if most > 0:
                places.append(index)
                candidates.append(Candidate(request, most))
        rows = sum(item.count for item in items)
        room = self._config.max_num_batched_tokens - rows
        if self._config.max_samples is not None:
            room = min(room, self._config.max_samples - sum(item.num_samples for item in items))
        drafts = self._speculator.drafts(candidates, len(decoding), rows, room)
        for index, candidate, draft in zip(places, candidates, drafts, strict=True):
            if draft:
                items[index] = self._verifying(candidate.request, items[index], draft, num_running)

    def _most(self, request: Request) -> int:
        """Return how many tokens may be drafted for a scheduled request, which may get all of them and one more."""
        if request.offloaded or request.restoring or len(request.token_ids) == request.num_prompt:
            return 0
        known, limit = len(request.token_ids), request.params.max_tokens
        left = self._config.max_model_len - known
        if limit is not None:
            left = min(left, limit - (known - request.num_prompt))
        return min(self._speculator.most_tokens, left - 1)

    def _verifying(self, request: Request, item: StepItem, draft: tuple[int, ...], num_running: int) -> StepItem:
        """Return the item with the part of a draft that fits into blocks which no other request is about to need."""
        draft = draft[:self._room(request, item.end, len(draft), num_running)]
        mask = item.mask
        if request.grammar is not None:
            draft, mask = request.grammar.draft_masks(draft)
        if not draft:
            return item
        request.verifying = True
        tables = [self._kv.table(request.request_id, group) for group in range(self._config.num_groups)]
        request.blocks_sent = len(tables[0])
        count = 1 + len(draft)
        return msgspec.structs.replace(
            item, phase=Phase.VERIFY, count=count, num_samples=count, draft=draft, mask=mask,
            new_blocks=tuple(tuple(table[item.first_block:]) for table in tables))

    def _room(self, request: Request, end: int, count: int, num_running: int) -> int:
        """Allocate blocks for up to `count` tokens after position `end`, except blocks that other requests are about to
        need; return for how many of the tokens there are blocks."""
        kv, id = self._kv, request.request_id
        room = len(kv.table(id)) * kv.block_size - end
        if count > room:
            spare = kv.num_free - num_running * self._config.num_groups
            if kv.blocks_needed(id, end + count) <= spare and kv.extend(id, end + count, urgent=False):
                return count
        return min(count, room)
