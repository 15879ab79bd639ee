"""The scheduler: continuous batching with chunked prefill under one token budget. Imports neither torch nor models.

`schedule()` for step N+1 may be called while step N runs: a token that N samples is then `pending`, known only to the
device. A request that leaves the running set (finished, aborted, preempted) keeps its blocks until every launched step
that includes it has completed, so no block is reused while a step may still access it.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections import deque
from collections.abc import Sequence

from spillover.engine.output.outputs import PositionLogprobs, TokenSources
from spillover.engine.queue_policy import POLICIES, PREFIXES_FIRST
from spillover.engine.requests.request import Request, Status
from spillover.engine.requests.shared_prompts import waits_for_prefix
from spillover.engine.scheduler_config import SchedulerConfig
from spillover.engine.speculation.branch_items import BranchItems
from spillover.engine.speculation.draft_items import DraftItems
from spillover.engine.speculation.speculator import NoSpeculation, Speculator
from spillover.engine.step import NewRequest, Phase, Step, StepItem, StepResult
from spillover.memory.connector import KVConnector
from spillover.memory.kv.kv_cache import KVCache

SHRINK_STEPS = 32  # steps between two checks for borrowed blocks that can be returned


class Scheduler:
    def __init__(self, config: SchedulerConfig, kv: KVCache, connector: KVConnector,
                 speculator: Speculator | None = None) -> None:
        self.config = config
        self.kv = kv
        self.connector = connector
        self.speculator: Speculator = speculator or NoSpeculation()
        self._drafts = DraftItems(config, kv, self.speculator)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission; the last is preempted first
        self.num_preemptions = 0
        self._policy = POLICIES[config.policy]
        self._leaving: set[Request] = set()  # requests removed from `running` whose last step is still in flight
        self._ended: list[Request] = []  # requests that schedule() finished by itself; returned by the next pop_ended()
        self._run_ids = itertools.count(1)
        self._branches = BranchItems(config, kv, self.speculator, self._run_ids)
        self._by_run_id: dict[int, Request] = {}  # requests that the runner has or gets with the next step, by run id
        self._new: list[NewRequest] = []  # new requests to send to the runner with the next step
        self._ended_ids: list[int] = []  # ids to send to the runner as ended with the next step
        self._watermark_blocks = int(config.watermark * kv.num_total)
        self._steps = 0
        self._chunk = 2 * config.max_num_batched_tokens  # maximum tokens not committed yet: two steps' with overlap
        self._refused: tuple[Request, int, tuple[int, ...]] | None = None  # last request refused, and the state then
        self._forming = True  # static batching: whether the batch still admits requests
        # Number of blocks offloaded at a time: whole splits of attention (kernels.attention.split_blocks).
        self._offload_unit = max(1, 256 // kv.block_size)

    # Called by the engine

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self._lookup(request)

    def schedule(self) -> Step:
        """Schedule decodes first, then prefills already begun, then new requests, up to the token budget; the rest of
        the budget is for draft tokens."""
        items: list[StepItem] = []
        budget = self.config.max_num_batched_tokens
        self.connector.poll_loads()
        for request in [r for r in self.running if r.restoring]:
            self._progress(request)
        if self.speculator.waits(self.running):
            return Step(())
        order = self._by_importance()  # a request scheduled earlier may preempt one that is not scheduled yet
        left = [(r, r.num_tokens - r.num_computed) for r in order]
        decodes, prefills = [r for r, count in left if count == 1], [r for r, count in left if count > 1]
        self.connector.reserve(len(decodes) * self.config.num_groups)
        for request in decodes + prefills:
            if request.status is not Status.RUNNING or not self._ready(request) or budget == 0:
                continue
            end = self.connector.limit(request.request_id, request.num_computed, request.num_tokens)
            count = min(end - request.num_computed, budget)
            if count and self._allocate_blocks(request, request.num_computed + count, items):
                items.append(self._make_item(request, count))
                budget -= count
        self._admit(items, budget)
        if not items:  # new and ended requests are sent with the next step that has items
            return Step(())
        if self.speculator.most_tokens:
            self._drafts.add(items, self._by_run_id, len(self.running))
            self._new += self._branches.add(items, self._by_run_id, len(self.running), self._num_held)
        step = Step(tuple(items), tuple(self._new), tuple(self._ended_ids))
        self._new.clear()
        self._ended_ids.clear()
        self.speculator.launched(step)
        return step

    def poll_transfers(self, step: Step) -> None:
        """Poll the cache's copies while this step, just launched, is computed. A step that only decodes leaves the host
        time for that; launching a prefill takes the host long, so copies other than loads may then be put off."""
        self.connector.poll(hurried=step.has_prefill)
        self.speculator.probe(self.running)
        self._return_borrowed()

    def observe_step(self, step: Step, seconds: float) -> None:
        """Update cost estimates with a step's duration."""
        self.connector.observe(step.prefill_tokens, step.num_tokens, seconds)
        self.speculator.observe_step(step, seconds)

    def pop_ended(self) -> list[Request]:
        """Return the requests that have finished without a step since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def finish(self, step: Step, result: StepResult) -> list[Request]:
        """Apply a step's result; return the requests that have new tokens or have finished."""
        changed = []
        now = time.monotonic()
        settled = self._branches.settle(step, result)
        result = settled.result
        for item, tokens, logprobs, prompt_logprobs in zip(
            settled.items, result.token_ids, result.logprobs, result.prompt_logprobs, strict=True
        ):
            request = self._by_run_id[item.id]
            request.in_flight -= 1
            request.pending -= item.num_samples > 0
            if request.status is not Status.FINISHED:
                end, known = item.end, request.token_ids
                if item.phase is Phase.VERIFY:  # rows of rejected draft tokens do not count as computed
                    end = request.num_computed = item.start + len(tokens)
                    if end // self.kv.block_size > self.kv.num_ready(request.request_id):  # the tokens are read
                        known = known + array("i", tokens)
                    request.verifying = False
                    self.speculator.verified(request, len(item.draft), len(tokens) - 1)
                self.kv.commit(request.request_id, known, end)
                if prompt_logprobs is not None:
                    request.prompt_logprobs.extend(prompt_logprobs)
                if tokens:
                    self._append(request, tokens, logprobs, now)
                    changed.append(request)
            if request.in_flight == 0 and request in self._leaving:
                self._leave(request)
        self._ended_ids += settled.ended_ids
        for request in settled.adopted:
            if request.run_id:
                self._drop_from_runner(request)  # the runner gets it again with its tokens and blocks of now
        self._steps += 1
        if self._steps % SHRINK_STEPS == 0:
            self.kv.shrink()
        self._return_borrowed()
        return changed

    def _return_borrowed(self) -> None:
        """Return borrowed blocks as soon as no request needs them."""
        while not self.running and not self.waiting and self.kv.shrink():
            pass

    def stop(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Finish a request now: a stop string was found, or its caller has disconnected."""
        if request.status is Status.FINISHED:
            itself = request.finish_reason == "length" or (request.finish_reason, request.stop_reason) == ("stop", None)
            if itself and reason == "stop":  # a stop string was found in the text of the last token
                request.finish_reason, request.stop_reason = reason, stop_reason
            return
        request.finish_reason, request.stop_reason = reason, stop_reason
        request.finished = time.monotonic()
        was, request.status = request.status, Status.FINISHED
        self.speculator.end(request)
        if was is Status.WAITING:
            self.waiting.remove(request)
            self.connector.forget(request.request_id)
        elif was is Status.RUNNING:
            self.running.remove(request)
            self._leave_when_idle(request)

    def preempt(self, request: Request) -> None:
        """Preempt a running request: once idle, its blocks are released and it waits at the head of the queue."""
        self.num_preemptions += 1
        request.num_preemptions += 1
        request.status = Status.PREEMPTED
        self.running.remove(request)
        self._leave_when_idle(request)

    def reset_prefix_cache(self, external: bool = False) -> None:
        """Drop every cached prefix on the device and in host memory; `external`: also on disk and in a remote store."""
        self.connector.clear(external)
        self.kv.reset_prefix_cache()
        self.speculator.reset_prefix_cache()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._leaving or self.connector.busy
                    or self.connector.has_urgent_spills)

    def slots(self) -> tuple[int, int]:
        """Return the token slots in running requests' blocks, and how many hold a token once launched steps end."""
        held = sum(len(self.kv.table(r.request_id)) for r in self.running) * self.kv.block_size
        return held, sum(r.num_computed for r in self.running)

    @property
    def _num_held(self) -> int:
        """Return the number of requests that have places in the runner's table, or get one with the next step."""
        return len(self.running) + len(self._leaving) + self._branches.num_in_flight

    def check(self) -> None:
        """Assert the invariants that hold between any two steps."""
        self.kv.check()
        self.connector.check()
        assert len(self.running) <= self.config.max_num_seqs
        assert all(r.status is Status.RUNNING for r in self.running)
        assert all(r.status is Status.WAITING and r.in_flight == 0 for r in self.waiting)
        assert all(r.in_flight > 0 for r in self._leaving)

    # Choosing a step's requests

    def _ready(self, request: Request) -> bool:
        """Return whether the request may run in another step before its pending token, if any, is known."""
        if request.pending == 0:
            return True
        if request.needs_previous_token or request.verifying:
            return False
        limit = request.params.max_tokens
        at_end = request.num_tokens >= self.config.max_model_len or (limit is not None and request.num_output >= limit)
        return not at_end

    def _make_item(self, request: Request, count: int) -> StepItem:
        """Make the step's item for the request's next `count` tokens."""
        start = request.num_computed
        end = start + count
        samples = end == request.num_tokens
        phase = Phase.DECODE if samples and count == 1 else Phase.PREFILL
        if not request.run_id:
            self._queue_new(request)
        # Any entry of the table may change while a prompt is computed or restored, or if blocks are in host memory.
        changed = phase is Phase.PREFILL or request.restoring or request.offloaded
        first = 0 if changed else request.blocks_sent
        tables = [self.kv.table(request.request_id, group) for group in range(self.config.num_groups)]
        item = StepItem(
            id=request.run_id,
            phase=phase,
            start=start,
            count=count,
            num_samples=int(samples),
            first_block=first,
            new_blocks=tuple(tuple(table[first:]) for table in tables),
            mask=request.grammar.mask() if samples and request.grammar is not None else b"",
            score_prompt=(start < request.num_prompt - 1 and end >= request.first_scored
                          and _needs_prompt_logits(request)),
            host_blocks=self.connector.host_blocks(request.request_id) if request.offloaded else (),
        )
        request.blocks_sent = len(tables[0])
        request.num_computed = end
        request.in_flight += 1
        request.pending += samples
        return item

    def _queue_new(self, request: Request) -> None:
        """Queue the request for the runner, which does not have it or dropped it at its preemption."""
        request.run_id, request.blocks_sent = next(self._run_ids), 0
        self._by_run_id[request.run_id] = request
        self._new.append(NewRequest(request.run_id, request.token_ids[:], request.num_prompt, request.params,
                                    request.seed, tuple(request.stop_ids), request.grammar is not None))

    def _allocate_blocks(self, request: Request, num_tokens: int, items: list[StepItem]) -> bool:
        """Allocate blocks for the request's first `num_tokens`, preempting later requests if there are too few."""
        urgent = bool(request.num_output)
        while not self.kv.extend(request.request_id, num_tokens, urgent):
            needed = self.kv.blocks_needed(request.request_id, num_tokens)
            if self.kv.grow(needed - self.kv.num_free):
                continue
            coming = self.kv.num_in_flight or needed <= self.kv.num_free
            # Blocks are about to be freed: wait for them rather than preempt more.
            if self._leaving or coming or self._branches.num_in_flight:
                return False
            if len(self.running) == 1:
                if self.kv.drop_duplicates(request.request_id):
                    continue
                self._offload(request)
                return False
            taken = {item.id for item in items}
            victim = next(r for r in self._by_importance(reverse=True) if r.run_id not in taken)
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _by_importance(self, reverse: bool = False) -> list[Request]:
        order = list(self.running)
        if self.config.policy == "priority":
            order.sort(key=lambda r: r.priority)
        return order[::-1] if reverse else order

    def _admit(self, items: list[StepItem], budget: int) -> None:
        if not self.waiting or not self._may_admit():
            return
        outstanding = sum(self.kv.blocks_needed(r.request_id, r.num_tokens) for r in self.running)
        for request in self._policy(list(self.waiting), self._match):
            if budget == 0:
                return
            if self._num_held >= self.config.max_num_seqs:
                break
            if self._must_wait_for_prefix(request) or not self._lookup(request):
                continue
            attempt = request, outstanding, self.kv.occupancy
            if self.running and attempt == self._refused:  # nothing has changed since it was refused
                break
            covered = self._begin(request)
            count = min(request.num_tokens - covered, budget)
            whole = self.config.chunked_prefill or count == request.num_tokens - covered
            fits = whole and self._fits(request, outstanding)
            end = self._load(request) if fits else None
            if end is None or not self.kv.extend(request.request_id, min(covered + count, end), urgent=False):
                self._release(request)
                lasting = whole and not fits and not self.kv.may_grow
                self._refused = attempt if lasting else None
                break
            count = min(count, end - covered)
            self.waiting.remove(request)
            self.running.append(request)
            self._enter(request, covered, end)
            if count:
                items.append(self._make_item(request, count))
            outstanding += self.kv.blocks_needed(request.request_id, request.num_tokens)
            budget -= count
        self._forming = False

    def _fits(self, request: Request, outstanding: int) -> bool:
        """Return whether a request just begun fits next to the blocks that running requests have yet to allocate."""
        needed = min(self.kv.blocks_needed(request.request_id, request.num_tokens),
                     self.kv.peak_blocks(request.num_tokens, self._chunk))
        if not self.running:  # a sequence longer than the pool runs alone, with its oldest blocks offloaded
            needed = min(needed, self.kv.num_total)
        needed += outstanding + (self._watermark_blocks if self.running else 0)
        if needed > self.kv.num_free:
            self.kv.grow(needed - self.kv.num_free)
        return needed <= self.kv.num_free

    def _may_admit(self) -> bool:
        """Return whether requests may be admitted: static batching forms a batch only when the last has finished."""
        if any(r.offloaded for r in self.running):
            return False
        if not self.config.static_batching:
            return True
        self._forming |= not self.running and not self._leaving
        return self._forming

    def _match(self, request: Request) -> int:
        return self.kv.match(_reusable(request), request.cache_salt)

    def _must_wait_for_prefix(self, request: Request) -> bool:
        """Return whether the request has to wait because its parent, or an unrelated request with the same prefix, has
        yet to compute prompt blocks that they share."""
        parent = request.parent
        if (parent is not None and len(parent.token_ids) == parent.num_prompt
                and parent.status in (Status.WAITING, Status.RUNNING, Status.PREEMPTED)):
            return True
        return (self.config.policy in PREFIXES_FIRST and not self.config.static_batching  # a batch is formed at once
                and not _needs_prompt_logits(request) and waits_for_prefix(request, self.running, self.kv))

    def _begin(self, request: Request) -> int:
        if _needs_prompt_logits(request):
            return self.kv.admit(request.request_id, _reusable(request), request.cache_salt)
        parent = request.parent
        if parent is not None and parent.status is Status.RUNNING and request.num_preemptions == 0:
            return self.kv.fork(parent.request_id, request.request_id, request.num_prompt - 1)
        return self.kv.admit(request.request_id, request.token_ids, request.cache_salt)

    def _load(self, request: Request) -> int | None:
        """Start loading stored blocks; return the token up to which to compute while they load, None without room."""
        if request.computes_all or _needs_prompt_logits(request):
            return request.num_tokens
        return self.connector.begin(request.request_id, request.token_ids, request.cache_salt)

    def _enter(self, request: Request, covered: int, end: int) -> None:
        """Start running the request: `covered` to `end` are computed while the tokens from `end` on are loaded."""
        self.connector.forget(request.request_id)
        request.status = Status.RUNNING
        request.num_computed = covered
        if end < request.num_tokens:
            request.restoring = True
            request.restore_started = time.monotonic()
        if request.sources is None:  # a preempted request keeps the count of its first admission
            self.kv.count_query(request.request_id)
            hit = min(covered, request.num_prompt)
            request.sources = TokenSources(computed=request.num_prompt - hit, device=hit)
            request.scheduled = time.monotonic()

    # Blocks in other tiers

    def _lookup(self, request: Request) -> bool:
        """Return whether the lookup of the request's blocks in the tiers is complete; until then others go first."""
        return _needs_prompt_logits(request) or self.connector.lookup(
            request.request_id, request.token_ids, request.cache_salt, request.params.kv_coming)

    def _progress(self, request: Request) -> None:
        """Count the tokens loaded so far as computed; preempt the request if its restore cannot complete."""
        progress = self.connector.progress(request.request_id, request.num_computed)
        if progress is None:
            request.computes_all = True
            self.preempt(request)
            return
        request.num_computed = progress.num_computed
        request.restoring = not progress.ended
        if not progress.loading and request.restore_ended == 0.0:
            request.restore_ended = time.monotonic()
        if progress.sources and request.num_preemptions == 0 and request.sources is not None:
            request.sources = request.sources.restored(progress.sources)
        if progress.sources and not request.in_flight:  # now, while others load, rather than after a step
            self.kv.commit(request.request_id, request.token_ids, request.num_computed)

    def _offload(self, request: Request) -> None:
        """Move the oldest blocks of the only running request, which has outgrown the device, to host memory."""
        if request.in_flight:
            return
        request.offloaded = True
        self.kv.commit(request.request_id, request.token_ids, request.num_computed)  # includes restored blocks
        if not self.connector.offload(request.request_id, self._offload_unit):
            self.stop(request, "length")
            self._ended.append(request)

    # Applying results and removing requests

    def _append(self, request: Request, tokens: Sequence[int], logprobs: Sequence[PositionLogprobs],
                now: float) -> None:
        """Append tokens until one finishes the request."""
        for token, logprob in itertools.zip_longest(tokens, logprobs):
            if logprob is not None:
                request.logprobs.append(logprob)
            self._append_one(request, token, now)
            if request.status is Status.FINISHED:
                return

    def _append_one(self, request: Request, token: int, now: float) -> None:
        request.token_ids.append(token)
        if request.grammar is not None:
            request.grammar.accept(token)
        outputs = len(request.token_ids) - request.num_prompt
        if outputs == 1:
            request.first_token = now
        if request.grammar is not None and request.grammar.error is not None:
            request.error = request.grammar.error
            self.stop(request, "error")
        elif token in request.stop_ids and outputs >= request.params.min_tokens:
            self.stop(request, "stop", token if token in request.params.stop_token_ids else None)
        elif request.grammar is not None and request.grammar.finished:
            self.stop(request, "stop")
        elif outputs == request.params.max_tokens or len(request.token_ids) >= self.config.max_model_len:
            self.stop(request, "length")

    def _leave_when_idle(self, request: Request) -> None:
        if request.in_flight:
            self._leaving.add(request)
        else:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        self._leaving.discard(request)
        self._release(request)
        if request.run_id:
            self._drop_from_runner(request)
        if request.status is Status.PREEMPTED:
            request.status = Status.WAITING
            request.num_computed = 0
            request.restoring = request.offloaded = False
            if _needs_prompt_logits(request):
                request.forget_prompt_logprobs()  # its prefill starts over
            self.waiting.appendleft(request)
            self._lookup(request)

    def _drop_from_runner(self, request: Request) -> None:
        del self._by_run_id[request.run_id]
        self._ended_ids.append(request.run_id)
        request.run_id = 0

    def _release(self, request: Request) -> None:
        self.connector.end(request.request_id)
        self.kv.release(request.request_id)


def _needs_prompt_logits(request: Request) -> bool:
    """Return whether prompt log probabilities are missing; a cached prefix may not cover positions that need them."""
    return request.params.prompt_logprobs is not None and len(request.prompt_logprobs) < request.num_prompt - 1


def _reusable(request: Request) -> Sequence[int]:
    """Return the tokens that may be looked up in the prefix cache; the last of them is always computed."""
    if not _needs_prompt_logits(request):
        return request.token_ids
    return request.token_ids[:request.first_scored] if request.first_scored > 1 else []
