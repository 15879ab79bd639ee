"""A drafter that is a head of the runner's own model: its state lies in the requests' KV blocks, and the runner keeps
what a draft begins with. All that is told here is where a draft begins, how long it may be and which blocks are new.

Nobody waits for the drafts where only the step that verifies them needs the tokens: a device keeps them, and that step
is made while the head still drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from spillover.engine.speculation.drafter import NOTHING, Draft
from spillover.engine.step import DraftItem, HeadDrafts

if TYPE_CHECKING:
    from spillover.engine.requests.request import Request
    from spillover.memory.kv.kv_cache import KVCache


class DraftingRunner(Protocol):
    def draft(self, items: Sequence[DraftItem], wait: bool = True) -> HeadDrafts:
        """Return draft tokens for each item; none for requests of which nothing was computed yet."""
        ...


class HeadDrafter:
    sequential = True  # each token takes a pass of the head

    def __init__(self, runner: DraftingRunner, kv: KVCache, expected: tuple[float, ...] | None = None) -> None:
        """Make the drafter. `expected`: as `Drafter` says."""
        self.expected = expected
        self.running: Callable[[], float] | None = None  # as `DraftsAhead` says
        self._runner = runner
        self._kv = kv

    def propose(self, asked: Sequence[tuple[Request, int]]) -> list[Draft]:
        drafts = [NOTHING] * len(asked)
        items = {index: item for index, (request, most) in enumerate(asked)
                 if (item := self._item(request, most)).count > 0}
        self.running = None
        if items:
            wait = any(_needs_tokens(request) for request, _ in asked)
            found, self.running = self._runner.draft(list(items.values()), wait)
            for index, tokens in zip(items, found, strict=True):
                drafts[index] = Draft(tokens, (1.0,) * len(tokens))
        return drafts

    def end(self, request: Request) -> None:
        """Do nothing: what is known of a request goes with its blocks."""

    def _item(self, request: Request, most: int) -> DraftItem:
        """Return what to ask for: as many tokens as there are slots in the blocks that the scheduler has taken."""
        start, size = len(request.token_ids) - 1, self._kv.block_size
        table = self._kv.table(request.request_id)
        first = start // size  # blocks before it were told when their positions were computed
        return DraftItem(request.run_id, start, min(most, len(table) * size - start), first, tuple(table[first:]))


def _needs_tokens(request: Request) -> bool:
    """Return whether the step that verifies a draft is made from its tokens: their masks, or what was said before."""
    return request.grammar is not None or request.params.needs_history
