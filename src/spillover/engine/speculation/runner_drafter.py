"""A drafter that is a model: a second runner decodes a few tokens ahead, driven by ordinary steps.

The runner has other weights than the one that verifies: a rounded copy of the same model, or a smaller model. Each
round tells it of the asked requests anew, launches one decode step per draft token without waiting for the tokens
between them, and ends the requests in the next round. `DraftBlocks` says where the KV of the drafting model lies.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from spillover.engine.requests.sampling_params import SamplingParams
from spillover.engine.speculation.drafter import Draft
from spillover.engine.step import NewRequest, Phase, Step, StepItem

if TYPE_CHECKING:
    from spillover.engine.loop import LaunchedStep, StepRunner
    from spillover.engine.requests.request import Request
    from spillover.memory.kv.kv_cache import KVCache

AHEAD = 3  # steps launched and not read yet; a CUDA runner keeps the results of four

Tables = tuple[tuple[int, ...], ...]  # block tables, one a layer group


class DraftBlocks(Protocol):
    """The KV blocks that a drafting runner reads and writes. Drafts are made from a request's known tokens, of which
    the newest never has KV: a round computes it, and one more position for each draft token but the last."""

    def reserve(self, request: Request, num_tokens: int) -> int:
        """Make room for KV of the first `num_tokens` positions where that takes nothing from anybody; return for how
        many there is room now."""
        ...

    def num_computed(self, request: Request) -> int:
        """Return how many of the request's known tokens have KV that the drafter can read; the newest has none."""
        ...

    def tables(self, request: Request) -> Tables:
        """Return the request's block tables."""
        ...

    def drafted(self, request: Request, num_tokens: int, tokens: Sequence[int]) -> None:
        """Note that the first `num_tokens` positions now have KV, those of these draft tokens included."""
        ...

    def end(self, request: Request) -> None:
        """Forget a request that has ended."""
        ...


class SharedBlocks:
    """The blocks of the model that verifies, for a drafting model whose KV is nearly the same: a rounded copy of it.

    Drafting reads exact KV, and writes its own from the newest token on. All of that is written anew by the model
    itself, when it computes the newest token and verifies the draft, before any of it counts as computed: so no exact
    KV is ever replaced, and no block enters the prefix cache or another tier with KV of a draft. The scheduler takes
    the blocks before it asks for drafts (SchedulerConfig.drafts_in_kv).
    """

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv

    def reserve(self, request: Request, num_tokens: int) -> int:
        return min(num_tokens, len(self._kv.table(request.request_id)) * self._kv.block_size)

    def num_computed(self, request: Request) -> int:
        return len(request.token_ids) - 1

    def tables(self, request: Request) -> Tables:
        return tuple(tuple(self._kv.table(request.request_id, group)) for group in range(len(self._kv.windows)))

    def drafted(self, request: Request, num_tokens: int, tokens: Sequence[int]) -> None:
        """Do nothing: drafts' KV is never used again."""

    def end(self, request: Request) -> None:
        """Do nothing: the scheduler gives the blocks back."""


@dataclass
class Drafting:
    """One request in a round."""

    request: Request
    id: int  # under which the runner knows it
    count: int  # tokens to draft
    start: int  # the next position to compute
    tables: Tables
    tokens: list[int] = field(default_factory=list)

    @property
    def known(self) -> int:
        return len(self.request.token_ids)

    def new(self) -> NewRequest:
        """Describe the request by what decides a draft: its tokens and random numbers, temperature and nucleus. What
        depends on the tokens before, which the device alone knows, is left out, and so are log probabilities."""
        request, asked = self.request, self.request.params
        params = SamplingParams(temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p, min_p=asked.min_p,
                                logit_bias=asked.logit_bias, max_tokens=None)
        return NewRequest(self.id, request.token_ids[:], request.num_prompt, params, request.seed, ())

    def take(self, count: int, samples: bool) -> StepItem:
        """Return an item of the next `count` positions."""
        tables, self.tables = self.tables, ((),) * len(self.tables)  # they are told once
        phase = Phase.DECODE if samples and count == 1 else Phase.PREFILL
        item = StepItem(self.id, phase, self.start, count, int(samples), 0, tables)
        self.start += count
        return item


class RunnerDrafter:
    sequential = True  # every draft token costs a pass of the runner

    def __init__(self, runner: StepRunner, blocks: DraftBlocks, max_num_batched_tokens: int,
                 expected: tuple[float, ...] | None = None) -> None:
        """Make the drafter. `max_num_batched_tokens`: of a step of the runner. `expected`: as `Drafter` says."""
        self.expected = expected
        self._runner = runner
        self._blocks = blocks
        self._max_num_batched_tokens = max_num_batched_tokens
        self._ids = itertools.count(1)
        self._new: tuple[NewRequest, ...] = ()  # for the runner to be told with the next step, as are ...
        self._gone: tuple[int, ...] = ()  # ... the requests of the last round

    def propose(self, asked: Sequence[tuple[Request, int]]) -> list[Draft]:
        rows = [self._begin(request, most) for request, most in asked]
        drafting = [row for row in rows if row.count > 0]
        if not drafting:
            return [Draft()] * len(rows)
        self._new = tuple(row.new() for row in drafting)
        ready = self._catch_up(drafting)
        launched: deque[tuple[LaunchedStep, list[Drafting]]] = deque()
        for index in range(max((row.count for row in ready), default=0)):
            going = [row for row in ready if row.count > index]
            launched.append((self._launch([row.take(max(1, row.known - row.start), True) for row in going]), going))
            if len(launched) == AHEAD:
                _read(launched)
        while launched:
            _read(launched)
        self._gone = tuple(row.id for row in drafting)
        for row in drafting:
            self._blocks.drafted(row.request, row.start, row.tokens)
        return [Draft(tuple(row.tokens), (1.0,) * len(row.tokens)) for row in rows]

    def end(self, request: Request) -> None:
        self._blocks.end(request)

    def _begin(self, request: Request, most: int) -> Drafting:
        before = len(request.token_ids) - 1
        count = self._blocks.reserve(request, before + most) - before
        if count < 1:
            return Drafting(request, 0, 0, before, ())
        return Drafting(request, next(self._ids), count, self._blocks.num_computed(request),
                         self._blocks.tables(request))

    def _catch_up(self, drafting: Sequence[Drafting]) -> Sequence[Drafting]:
        """Compute what the first step, which samples, has no room for; nothing where only the newest tokens miss.
        Return those that can be drafted for."""
        budget = self._max_num_batched_tokens
        left = budget - len(drafting)  # that step has a row of everybody
        for row in drafting:
            missing = row.known - 1 - row.start
            if missing <= left:
                left -= missing
                continue
            while row.start < row.known - 1:
                count = min(row.known - 1 - row.start, budget)
                self._launch([row.take(count, False)]).result()
        return drafting

    def _launch(self, items: Sequence[StepItem]) -> LaunchedStep:
        step = Step(tuple(items), self._new, self._gone)
        self._new = self._gone = ()
        return self._runner.launch(step)


def _read(launched: deque[tuple[LaunchedStep, list[Drafting]]]) -> None:
    """Take in the tokens of the step launched first."""
    step, rows = launched.popleft()
    for row, tokens in zip(rows, step.result().token_ids, strict=True):
        row.tokens.extend(tokens)
