"""Adds branches of drafts to a step, as requests of their own, and merges their results into those of the drafts."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from spillover.engine.requests.request import Request, Status
from spillover.engine.speculation.branches import Chain, Place, Seed
from spillover.engine.speculation.model_speculator import ModelSpeculator
from spillover.engine.speculation.speculator import Speculator
from spillover.engine.step import NewRequest, Phase, Step, StepItem, StepResult
from spillover.memory.kv.kv_cache import KVCache

if TYPE_CHECKING:
    from spillover.engine.scheduler_config import SchedulerConfig


class _Begun(NamedTuple):
    """A branch before its tokens are drafted."""

    place: Place
    seed: Seed
    sequence: str  # name of the KV sequence that has its blocks


@dataclass(frozen=True)
class _Branch:
    """A branch that is being verified."""

    sequence: str  # name of the KV sequence that has its blocks
    request: Request
    index: int  # index of the draft's item in the step
    at: int  # number of the draft's tokens before the branch


@dataclass(frozen=True)
class Settled:
    """A completed step without branches."""

    items: Sequence[StepItem]
    result: StepResult
    ended_ids: Sequence[int] = ()  # run ids of the branches
    adopted: Sequence[Request] = ()  # requests that got tokens and blocks of a branch, which the runner does not know


class BranchItems:
    def __init__(self, config: SchedulerConfig, kv: KVCache, speculator: Speculator, run_ids: Iterator[int]) -> None:
        self._config = config
        self._kv = kv
        self._speculator: ModelSpeculator | None = None  # None: drafts have no branches
        if isinstance(speculator, ModelSpeculator) and speculator.most_branches:
            self._speculator = speculator
        self._run_ids = run_ids
        self._in_flight: dict[int, _Branch] = {}  # branches that a step verifies, by run id

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def add(self, items: list[StepItem], requests: Mapping[int, Request], num_running: int,
            num_held: int) -> list[NewRequest]:
        """Add branches to a step with drafts, as far as other requests do not need the blocks; return their requests.
        `num_running`: number of running requests; `num_held`: number of requests that the runner holds."""
        if self._speculator is None:
            return []
        drafted = [index for index, item in enumerate(items) if item.phase is Phase.VERIFY]
        if not drafted:
            return []
        chains = [self._chain(requests[items[index].id], items[index]) for index in drafted]
        rows = sum(item.count for item in items)
        places, length = self._speculator.branches(chains, rows, self._config.max_num_batched_tokens - rows)
        del places[max(0, self._config.max_num_seqs - num_held):]
        begun = self._begin(places, length, chains, [items[index] for index in drafted], num_running,
                            self._config.max_num_batched_tokens - rows)
        extended = self._speculator.extend_branches([each.seed for each in begun])
        samples, most = sum(item.num_samples for item in items), self._config.max_samples
        new = []
        for each, more in zip(begun, extended, strict=True):
            request, prefix = each.seed.request, each.seed.prefix
            branch = self._item(each, (each.place.token, *more))
            if branch is None or (most is not None and samples + branch.num_samples > most):
                self._kv.release(each.sequence)
                continue
            samples += branch.num_samples
            items.append(branch)
            self._in_flight[branch.id] = _Branch(each.sequence, request, drafted[each.place.chain], each.place.at)
            new.append(NewRequest(branch.id, request.token_ids + array("i", prefix[:-1]), request.num_prompt,
                                  request.params, request.seed, tuple(request.stop_ids), request.grammar is not None))
        return new

    def _begin(self, places: Sequence[Place], length: int, chains: Sequence[Chain], verifying: Sequence[StepItem],
               num_running: int, room: int) -> list[_Begun]:
        """Fork the requests at these places, for up to `length` further tokens each, as far as there are blocks and
        `room` for rows. `verifying`: the items of the chains."""
        found: list[_Begun] = []
        for place in places:
            chain, item = chains[place.chain], verifying[place.chain]
            prefix = (*item.draft[:place.at], place.token)
            more = min(length, chain.length - len(prefix))
            rows = chain.again + len(prefix) + more
            sequence = f"{chain.request.request_id}/branch-{len(found)}"
            if rows <= room and self._fork(chain, item, sequence, len(prefix) + more, num_running):
                room -= rows
                tables = tuple(tuple(self._kv.table(sequence, group)) for group in range(self._config.num_groups))
                seed = Seed(chain.request, prefix, more, item.start + 1 - chain.again, tables)
                found.append(_Begun(place, seed, sequence))
        return found

    def settle(self, step: Step, result: StepResult) -> Settled:
        """Merge the branches of a completed step into its drafts. The tokens of an accepted branch become part of its
        draft's result, and its blocks become those of the request."""
        branches = {index: self._in_flight.pop(item.id) for index, item in enumerate(step.items)
                    if item.id in self._in_flight} if self._in_flight else {}
        if not branches:
            return Settled(step.items, result)
        count = len(step.items) - len(branches)  # branches come last
        merged = StepResult(result.token_ids[:count], result.logprobs[:count], result.prompt_logprobs[:count])
        of_draft: dict[int, list[int]] = {}  # by index of a draft's item, the indices of its branches
        for index, branch in branches.items():
            of_draft.setdefault(branch.index, []).append(index)
        adopted: list[Request] = []
        for draft, indices in of_draft.items():
            request, chain, accepted = branches[indices[0]].request, result.token_ids[draft], 0
            for index in indices:
                branch, found = branches[index], result.token_ids[index]
                if len(chain) != branch.at + 1 or chain[-1] != step.items[index].draft[0]:
                    self._kv.release(branch.sequence)
                    continue
                merged.token_ids[draft] = chain[:-1] + found
                merged.logprobs[draft] = result.logprobs[draft][:-1] + result.logprobs[index]
                self._kv.adopt(request.request_id, branch.sequence)
                adopted.append(request)
                accepted = len(found) - 1
            if self._speculator is not None and request.status is not Status.FINISHED:
                tokens = sum(len(step.items[index].draft) for index in indices)
                self._speculator.branched(request, len(chain) - 1, chain[-1], len(indices), tokens, accepted)
        return Settled(step.items[:count], merged, [step.items[index].id for index in branches], adopted)

    def _chain(self, request: Request, item: StepItem) -> Chain:
        complete = self._kv.num_ready(request.request_id) * self._kv.block_size
        return Chain(request, len(item.draft), item.start + 1 - complete)

    def _fork(self, chain: Chain, item: StepItem, sequence: str, tokens: int, num_running: int) -> bool:
        """Give a branch of `tokens` tokens blocks which no other request is about to need; return whether there are."""
        kv, end = self._kv, item.start + 1 + tokens
        computed = item.start + 1 - chain.again
        needed = (-(-end // kv.block_size) - computed // kv.block_size) * self._config.num_groups
        if needed > kv.num_free - num_running * self._config.num_groups:
            return False
        covered = kv.fork(chain.request.request_id, sequence, item.start)
        if covered == computed and kv.extend(sequence, end, urgent=False):
            return True
        kv.release(sequence)
        return False

    def _item(self, begun: _Begun, draft: tuple[int, ...]) -> StepItem | None:
        """Return the item that verifies a branch; None if the request's grammar does not allow the branch."""
        seed, at, request, mask = begun.seed, begun.place.at, begun.seed.request, b""
        if request.grammar is not None:
            allowed, masks = request.grammar.draft_masks((*seed.prefix[:at], *draft))
            draft = allowed[at:]
            if not draft:
                return None
            mask = masks[at * (len(masks) // (len(allowed) + 1)):]
        first = len(request.token_ids) + at - seed.start  # rows before those of the branch's tokens
        return StepItem(next(self._run_ids), Phase.VERIFY, seed.start, first + len(draft), 1 + len(draft), 0,
                        seed.tables, draft, mask)
