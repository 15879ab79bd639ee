"""A drafter that is a head of the runner's model: its state is in the requests' KV blocks, and the runner keeps the
hidden states that drafts begin with. This file only says where a draft begins, its length and the new blocks.

If only the step that verifies the drafts needs their tokens, they stay on the device, and the step is prepared while
the head still drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from spillover.engine.speculation.drafters.drafter import NOTHING, Draft
from spillover.engine.step import DraftItem, HeadDrafts

if TYPE_CHECKING:
    from spillover.engine.requests.request import Request
    from spillover.memory.kv.kv_cache import KVCache


class DraftingRunner(Protocol):
    def draft(self, items: Sequence[DraftItem], wait: bool = True) -> HeadDrafts:
        """Return draft tokens for each item; () for requests whose last step did not compute the position before."""
        ...


class HeadDrafter:
    sequential = True  # each token takes a pass of the head

    def __init__(self, runner: DraftingRunner, kv: KVCache, expected: tuple[float, ...] | None = None) -> None:
        """Make the drafter. `expected`: see `Drafter.expected`."""
        self.expected = expected
        self.running: Callable[[], float] | None = None  # see `AsyncDrafter.running`
        self._runner = runner
        self._kv = kv

    def propose(self, requests: Sequence[tuple[Request, int]]) -> list[Draft]:
        drafts = [NOTHING] * len(requests)
        items = {index: item for index, (request, most) in enumerate(requests)
                 if (item := self._item(request, most)).count > 0}
        self.running = None
        if items:
            wait = any(_needs_tokens(request) for request, _ in requests)
            found, self.running = self._runner.draft(list(items.values()), wait)
            for index, tokens in zip(items, found, strict=True):
                drafts[index] = Draft(tokens, (1.0,) * len(tokens))
        return drafts

    def end(self, request: Request) -> None:
        """Do nothing: the state of a request is in its blocks and is freed with them."""

    def _item(self, request: Request, most: int) -> DraftItem:
        """Return the item of a request, limited to the slots in the blocks that the scheduler has allocated."""
        start, size = len(request.token_ids) - 1, self._kv.block_size
        table = self._kv.table(request.request_id)
        first = start // size  # earlier blocks were sent to the runner when their positions were computed
        count = min(most, len(table) * size - start)
        return DraftItem(request.run_id, start, count, first, tuple(table[first:(start + count) // size + 1]))


def _needs_tokens(request: Request) -> bool:
    """Return whether preparing the verify step needs the draft tokens: for grammar masks, or for penalties."""
    return request.grammar is not None or request.params.needs_history
