"""A drafter that is a smaller model, with separate weights, KV blocks and prefix cache.

KV that it lacks (of a new request, of a prefix that the target model found in its cache or in another tier, of tokens
decoded while nothing was drafted) is computed first, some rows per round; until then the request gets no draft. So
drafts are only made from complete KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spillover.engine.speculation.drafters.drafter import NOTHING, Draft
from spillover.engine.speculation.drafters.own_blocks import OwnBlocks
from spillover.engine.speculation.drafters.runner_drafter import Drafting, RunnerDrafter
from spillover.engine.speculation.drafters.vocabulary import DraftVocabulary
from spillover.plan.drafting import CATCH_UP_ROWS

if TYPE_CHECKING:
    from spillover.engine.loop import StepRunner
    from spillover.engine.requests.request import Request

FEW_ROWS = 8  # maximum missing rows of a request that are computed in the step that drafts its first token


class DraftModel:
    """Drafts with a separate runner, which `close` closes too."""

    sequential = True

    def __init__(self, runner: StepRunner, blocks: OwnBlocks, vocabulary: DraftVocabulary,
                 max_num_batched_tokens: int, expected: tuple[float, ...] | None = None) -> None:
        """Make the drafter. `expected`: see `Drafter.expected`."""
        self.expected = expected
        self.runner = runner
        self.blocks = blocks
        self._vocabulary = vocabulary
        self._drafter = _Chunked(runner, blocks, max_num_batched_tokens)

    @property
    def passes(self) -> Sequence[int]:
        """Return the number of passes of the last call for each request; 0 if the request's KV is not complete yet."""
        return self._drafter.passes

    @property
    def caught_up(self) -> int:
        """Return the number of tokens whose missing KV the last call computed."""
        return self._drafter.caught_up

    def missing(self, request: Request) -> int:
        """Return the number of tokens whose KV must be computed before the request can be drafted for."""
        draft_request = self._vocabulary.draft_request(request)
        return max(0, len(draft_request.token_ids) - 1 - FEW_ROWS - self.blocks.num_known(draft_request))

    def propose(self, requests: Sequence[tuple[Request, int]]) -> list[Draft]:
        draft_requests = [(self._vocabulary.draft_request(request), most) for request, most in requests]
        drafts = self._drafter.propose(draft_requests)
        found = []
        for (request, most), draft in zip(requests, drafts, strict=True):
            tokens = self._vocabulary.to_target(request, draft.tokens)[:most] if draft.tokens else ()
            found.append(Draft(tokens, (1.0,) * len(tokens)) if tokens else NOTHING)
        return found

    def end(self, request: Request) -> None:
        self._drafter.end(self._vocabulary.draft_request(request))
        self._vocabulary.end(request)

    def reset_prefix_cache(self) -> None:
        self.blocks.kv.reset_prefix_cache()

    def sleep(self) -> None:
        """Free device memory: weights move to the host, and all KV is dropped."""
        self.blocks.forget()
        self.runner.sleep([])

    def wake_up(self) -> None:
        self.runner.wake_up()

    def close(self) -> None:
        self.runner.close()


class _Chunked(RunnerDrafter):
    """A RunnerDrafter that computes missing KV a limited number of rows per round."""

    passes: Sequence[int] = ()
    caught_up = 0

    def propose(self, requests: Sequence[tuple[Request, int]]) -> list[Draft]:
        self.caught_up = 0
        found = super().propose(requests)
        self.passes = [len(draft.tokens) for draft in found]
        return found

    def _catch_up(self, drafting: Sequence[Drafting]) -> list[Drafting]:
        left = self._max_num_batched_tokens - len(drafting)  # free rows of the first step: every request needs one
        chunk = min(CATCH_UP_ROWS, self._max_num_batched_tokens)
        ready, items = [], []
        for row in drafting:
            missing = row.known - 1 - row.start
            if missing <= min(FEW_ROWS, left):
                left -= missing
                ready.append(row)
                continue
            count = min(missing, chunk)
            if count:
                items.append(row.make_item(count, False))
                chunk -= count
            if count == missing:
                ready.append(row)
        if items:
            self.caught_up = sum(item.count for item in items)
            self._launch(items).result()
        return ready
