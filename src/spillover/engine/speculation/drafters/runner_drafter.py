"""A drafter that is a model: a second runner decodes a few tokens ahead, driven by ordinary steps.

The runner has different weights than the one that verifies: a rounded copy of the same model, or a smaller model. Each
round adds the requests to the runner, launches one decode step per draft token without waiting for tokens in between,
and removes the requests with the next round. `DraftBlocks` determines where the KV of the drafting model is stored.

Branches of drafts (`speculation/branches.py`) take a second round, in which each branch is a request of the runner.
"""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from spillover.engine.output.outputs import PositionLogprobs
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.engine.speculation.branches import Seed
from spillover.engine.speculation.drafters.drafter import Alternative, Draft
from spillover.engine.step import NewRequest, Phase, Step, StepItem

if TYPE_CHECKING:
    from spillover.engine.loop import LaunchedStep, StepRunner
    from spillover.engine.requests.request import Request
    from spillover.memory.kv.kv_cache import KVCache

AHEAD = 3  # maximum steps launched whose results are not read yet; a CUDA runner keeps the results of four

Tables = tuple[tuple[int, ...], ...]  # block tables, one per layer group


class DraftBlocks(Protocol):
    """The KV blocks that a drafting runner reads and writes. A draft follows a request's known tokens, of which the
    newest never has KV: a round computes it, and one more position for each draft token but the last."""

    def reserve(self, request: Request, num_tokens: int) -> int:
        """Reserve blocks for KV of the first `num_tokens` positions, as far as other requests do not need them; return
        the number of positions that may be used."""
        ...

    def num_computed(self, request: Request) -> int:
        """Return how many of the request's known tokens have KV that the drafter can read; the newest never has."""
        ...

    def tables(self, request: Request) -> Tables:
        """Return the request's block tables."""
        ...

    def drafted(self, request: Request, num_tokens: int, tokens: Sequence[int]) -> None:
        """Record that the first `num_tokens` positions now have KV, including positions of these draft tokens."""
        ...

    def end(self, request: Request) -> None:
        """Drop the state of a finished request."""
        ...


class SharedBlocks:
    """The blocks of the target model, used by a drafting model whose KV is nearly the same: a rounded copy of it.

    Drafting reads exact KV, and writes its KV from the newest token on. The target overwrites all of this when it
    computes the newest token and verifies the draft, before any of it counts as computed: so no exact KV is replaced,
    and no block enters the prefix cache or another tier with KV of a draft. The scheduler allocates the blocks before
    it requests drafts (SchedulerConfig.drafts_in_kv).
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
        """Do nothing: the KV of drafts is never used again."""

    def end(self, request: Request) -> None:
        """Do nothing: the scheduler releases the blocks."""


@dataclass
class Drafting:
    """The state of one request in a round."""

    request: Request
    id: int  # id of the request at the drafting runner
    count: int  # number of tokens to draft
    start: int  # the next position to compute
    tables: Tables
    prefix: tuple[int, ...] = ()  # tokens after the request's, which a branch begins with
    tokens: list[int] = field(default_factory=list)
    alternatives: list[Alternative] = field(default_factory=list)

    @property
    def known(self) -> int:
        return len(self.request.token_ids) + len(self.prefix)

    def new(self, logprobs: int | None) -> NewRequest:
        """Return the request for the drafting runner, with its seed and sampling parameters. Parameters that depend on
        earlier tokens are left out, as only the device has these; `logprobs` replaces what the request asks for."""
        request, params = self.request, self.request.params
        kept = SamplingParams(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p,
                              min_p=params.min_p, logit_bias=params.logit_bias, max_tokens=None, logprobs=logprobs)
        token_ids = request.token_ids + array("i", self.prefix)
        return NewRequest(self.id, token_ids, request.num_prompt, kept, request.seed, ())

    def make_item(self, count: int, samples: bool) -> StepItem:
        """Return an item for the next `count` positions."""
        tables, self.tables = self.tables, ((),) * len(self.tables)  # block tables are sent once
        phase = Phase.DECODE if samples and count == 1 else Phase.PREFILL
        item = StepItem(self.id, phase, self.start, count, int(samples), 0, tables)
        self.start += count
        return item


class RunnerDrafter:
    sequential = True  # every draft token takes a pass of the runner

    def __init__(self, runner: StepRunner, blocks: DraftBlocks, max_num_batched_tokens: int,
                 expected: tuple[float, ...] | None = None) -> None:
        """Make the drafter. `max_num_batched_tokens`: maximum of a step of the runner; `expected`: see `Drafter`."""
        self.expected = expected
        self.wants_alternatives = False  # whether the next drafts have `Draft.alternatives`
        self._runner = runner
        self._blocks = blocks
        self._max_num_batched_tokens = max_num_batched_tokens
        self._ids = itertools.count(1)
        self._new: tuple[NewRequest, ...] = ()  # new requests to send to the runner with the next step
        self._ended_ids: tuple[int, ...] = ()  # ids of the last round's requests, to send as ended with the next step

    def propose(self, requests: Sequence[tuple[Request, int]]) -> list[Draft]:
        rows = [self._begin(request, most) for request, most in requests]
        drafting = [row for row in rows if row.count > 0]
        if not drafting:
            return [Draft()] * len(rows)
        self._decode(drafting, 2 if self.wants_alternatives else None)
        for row in drafting:
            self._blocks.drafted(row.request, row.start, row.tokens)
        return [Draft(tuple(row.tokens), (1.0,) * len(row.tokens), tuple(row.alternatives)) for row in rows]

    def extend(self, seeds: Sequence[Seed]) -> list[tuple[int, ...]]:
        """Return the tokens that follow the first token of each branch."""
        rows = [Drafting(seed.request, next(self._ids), seed.most, seed.start, seed.tables, seed.prefix)
                for seed in seeds]
        drafting = [row for row in rows if row.count > 0]
        if drafting:
            self._decode(drafting, None)
        return [tuple(row.tokens) for row in rows]

    def _decode(self, drafting: Sequence[Drafting], logprobs: int | None) -> None:
        """Decode `count` tokens of each row, all rows in the same passes."""
        self._new = tuple(row.new(logprobs) for row in drafting)
        ready = self._catch_up(drafting)
        launched: deque[tuple[LaunchedStep, list[Drafting]]] = deque()
        for index in range(max((row.count for row in ready), default=0)):
            active = [row for row in ready if row.count > index]
            items = [row.make_item(max(1, row.known - row.start), True) for row in active]
            launched.append((self._launch(items), active))
            if len(launched) == AHEAD:
                _read(launched)
        while launched:
            _read(launched)
        self._ended_ids = tuple(row.id for row in drafting)

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
        """Compute missing KV that does not fit into the first sampling step, which computes the newest tokens anyway.
        Return the requests that can be drafted for."""
        budget = self._max_num_batched_tokens
        left = budget - len(drafting)  # free rows of the first step: every request needs one
        for row in drafting:
            missing = row.known - 1 - row.start
            if missing <= left:
                left -= missing
                continue
            while row.start < row.known - 1:
                count = min(row.known - 1 - row.start, budget)
                self._launch([row.make_item(count, False)]).result()
        return drafting

    def _launch(self, items: Sequence[StepItem]) -> LaunchedStep:
        step = Step(tuple(items), self._new, self._ended_ids)
        self._new = self._ended_ids = ()
        return self._runner.launch(step)


def _read(launched: deque[tuple[LaunchedStep, list[Drafting]]]) -> None:
    """Read the tokens of the step that was launched first."""
    step, rows = launched.popleft()
    result = step.result()
    for row, tokens, logprobs in zip(rows, result.token_ids, result.logprobs, strict=True):
        row.tokens.extend(tokens)
        row.alternatives += [_alternative(token, found) for token, found in zip(tokens, logprobs, strict=False)]


def _alternative(token: int, found: PositionLogprobs) -> Alternative:
    """Return the most likely token other than the one that was sampled."""
    other = next(each for each in found if each != token)
    return Alternative(other, found[token].logprob - found[other].logprob)
