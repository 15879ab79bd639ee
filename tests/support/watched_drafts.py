"""A recorder for a runner with a head: its drafts, the tokens before each, and the head's rows that followed zeros."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from spillover.engine.loop import LaunchedStep
from spillover.engine.step import DraftItem, HeadDrafts, Step
from support.models.eagle_heads import ReferenceHead

Tokens = tuple[int, ...]


@dataclass
class WatchedDrafts:
    """The recorded drafts. Each step must be complete before the next is launched: `--no-async-scheduling`."""

    # (all tokens before the draft, the draft, the rows that followed zeros; None if these cannot be determined)
    drafts: list[tuple[Tokens, Tokens, set[int] | None]] = field(default_factory=list)
    zeros: defaultdict[Tokens, set[bool]] = field(default_factory=lambda: defaultdict(set))  # of all rows, by tokens
    _own: defaultdict[int, dict[int, bool]] = field(default_factory=lambda: defaultdict(dict))  # by request, position
    _last: dict[int, tuple[int, int]] = field(default_factory=dict)

    @staticmethod
    def of(runner: Any) -> WatchedDrafts:
        """Watch an engine's runner, on any device."""
        watched, launch, draft = WatchedDrafts(), runner.launch, runner.draft

        def watched_launch(step: Step) -> LaunchedStep:
            launched: LaunchedStep = launch(step)
            for item in step.items:
                tokens = (*runner.table[item.id].token_ids[:item.end], *item.draft)
                first, end = watched._last.get(item.id, (0, 0))
                watched._last[item.id] = item.start, item.end
                for position in range(item.start, item.end):
                    follows = position > item.start or first < position <= end
                    watched.zeros[tokens[:position + 1]].add(not follows)
                    watched._own[item.id][position] = not follows
            return launched

        def watched_draft(items: Sequence[DraftItem], wait: bool = True) -> HeadDrafts:
            found: HeadDrafts = draft(items, wait=True)
            for item, tokens in zip(items, found.tokens, strict=True):
                assert len(tokens) in (0, item.count)
                if tokens:
                    before = tuple(runner.table[item.id].token_ids[:item.start + 1])
                    watched.drafts.append((before, tokens, watched._without(item.id, before)))
            return found

        runner.launch = watched_launch
        runner.draft = watched_draft
        return watched

    def _without(self, id: int, tokens: Tokens) -> set[int] | None:
        """Return the rows that followed zeros; None if a cached row was also computed after hidden states."""
        own = self._own[id]
        rows = [{own[position]} if position in own else self.zeros[tokens[:position + 1]]
                for position in range(len(tokens) - 1)]
        if any(len(row) != 1 for row in rows):
            return None
        return {position for position, row in enumerate(rows) if True in row}

    def check(self, reference: ReferenceHead, others: float = 0.0) -> int:
        """Compare every second draft with the definition; return the number of comparable drafts. `others`: the share
        that may differ, because another order of summation can change the most likely token."""
        known = [(tokens, found, without) for tokens, found, without in self.drafts if without is not None]
        wrong = [len(tokens) for tokens, found, without in known[::2]
                 if list(found) != reference.draft(list(tokens), len(found), without)]
        assert len(wrong) <= others * len(known[::2]), f"other drafts behind {wrong} tokens"
        return len(known)
