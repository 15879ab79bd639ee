"""Who runs in the next step: continuous batching with chunked prefill under one token budget. No torch, no model.

`schedule()` for step N+1 may be called while step N runs: a token that N draws is then `pending`, known only to the
device. A request that leaves the running set (finished, aborted, preempted) keeps its blocks until every launched step
that touches it has ended, so no block is reused under a running step.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from dataclasses import dataclass, replace

from spillover.engine.outputs import TokenSources
from spillover.engine.queue_policy import POLICIES
from spillover.engine.request import Request, Status
from spillover.engine.restore_plan import first_to_load
from spillover.engine.step import NewRequest, Phase, Step, StepItem, StepResult
from spillover.memory.kv_cache import KVCache

SHRINK_STEPS = 32  # between two looks whether blocks on loan can go back
LEARN_TOKENS = 64  # a step that prefills this many tells how long a token takes


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_groups: int = 1
    chunked_prefill: bool = True
    static_batching: bool = False
    policy: str = "fcfs"
    watermark: float = 0.01
    restore: str = "auto"  # "auto" | "always" | "never": stored blocks of other tiers, or computing them again
    prefill_seconds: float | None = None  # a token, until steps have been seen; None: not known


class Scheduler:
    def __init__(self, config: SchedulerConfig, kv: KVCache) -> None:
        self.config = config
        self.kv = kv
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of admission; the last is the first to be preempted
        self.num_preemptions = 0
        self.prefill_seconds = config.prefill_seconds  # a token, as lately measured
        self.step_seconds = math.inf  # of the shortest step that had part of a prompt
        self._policy = POLICIES[config.policy]
        self._leaving: set[Request] = set()  # out of `running`, with a step still in flight
        self._ended: list[Request] = []  # by schedule() itself, and not told yet
        self._run_ids = itertools.count(1)
        self._by_run_id: dict[int, Request] = {}  # those that the runner knows
        self._new: list[NewRequest] = []  # for the runner to be told with the next step, as are ...
        self._gone: list[int] = []  # ... those that will not run again under their id
        self._watermark_blocks = int(config.watermark * kv.num_total)
        self._steps = 0
        self._chunk = 2 * config.max_num_batched_tokens  # with overlap, two steps lie between a chunk and its commit
        self._forming = True  # static batching: the batch still takes requests in
        self._park_unit = max(1, 256 // kv.block_size)  # whole splits of attention (kernels.attention.split_blocks)

    def learn(self, step: Step, seconds: float) -> None:
        """A step took that long. A faster prefill counts at once: the slower ones before it were held up by something,
        such as their first use of a kernel."""
        tokens = sum(item.count for item in step.items if item.phase is Phase.PREFILL)
        if tokens:
            self.step_seconds = min(self.step_seconds, seconds)
        if tokens >= LEARN_TOKENS:
            seconds /= step.num_tokens
            known = self.prefill_seconds
            self.prefill_seconds = seconds if known is None or seconds < known else known + 0.1 * (seconds - known)

    # What the engine calls

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self._seek(request)

    def schedule(self) -> Step:
        """Decodes first, then prefills already begun, then new requests, until the token budget is used up."""
        items: list[StepItem] = []
        budget = self.config.max_num_batched_tokens
        if self.kv.store is not None:
            self.kv.poll_loads()
            for request in [r for r in self.running if r.restoring]:
                self._take_over(request)
        order = self._by_importance()  # who is served may push out who is not yet
        decodes = [r for r in order if r.num_tokens - r.num_computed == 1]
        prefills = [r for r in order if r.num_tokens - r.num_computed > 1]
        self.kv.keep_ready(len(decodes) * self.config.num_groups)
        for request in decodes + prefills:
            if request.status is not Status.RUNNING or not self._ready(request) or budget == 0:
                continue
            count = min(request.num_tokens - request.num_computed, budget, self._to_compute(request))
            if count and self._make_room(request, request.num_computed + count, items):
                items.append(self._take(request, count))
                budget -= count
        self._admit(items, budget)
        if not items:  # what the runner is to be told waits for a step that runs
            return Step(())
        step = Step(tuple(items), tuple(self._new), tuple(self._gone))
        self._new.clear()
        self._gone.clear()
        return step

    def tend(self, step: Step) -> None:
        """Looks after the cache's copies while this step, just launched, is computed. Beside one that only decodes
        there is time; one with part of a prompt has kept the host busy launching it, and there is none to lose."""
        if self.kv.store is not None:
            if step.has_prefill and self.kv.put_off():
                self.kv.poll_loads()
            else:
                self.kv.poll()
                self._give_back()

    def take_ended(self) -> list[Request]:
        """Requests that have ended without a step since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def finish(self, step: Step, result: StepResult) -> list[Request]:
        """Take in what a step brought; returns the requests that have a new token or have ended."""
        changed = []
        now = time.monotonic()
        for item, tokens, logprobs, prompt_logprobs in zip(
            step.items, result.token_ids, result.logprobs, result.prompt_logprobs, strict=True
        ):
            request = self._by_run_id[item.id]
            request.in_flight -= 1
            request.pending -= item.num_samples
            if request.status is not Status.FINISHED:
                self.kv.commit(request.request_id, request.token_ids, item.end)
                if prompt_logprobs is not None:
                    request.prompt_logprobs.extend(prompt_logprobs)
                if tokens:
                    request.logprobs.extend(logprobs)
                    self._append(request, tokens[0], now)
                    changed.append(request)
            if request.in_flight == 0 and request in self._leaving:
                self._leave(request)
        self._steps += 1
        if self._steps % SHRINK_STEPS == 0:
            self.kv.loans.shrink()
        self._give_back()
        return changed

    def _give_back(self) -> None:
        """Blocks on loan, as soon as nobody needs them."""
        while not self.running and not self.waiting and self.kv.loans.shrink():
            pass

    def stop(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """End a request now: a stop string was found, or its caller has gone."""
        if request.status is Status.FINISHED:
            itself = request.finish_reason == "length" or (request.finish_reason, request.stop_reason) == ("stop", None)
            if itself and reason == "stop":  # found in the text of the very last token
                request.finish_reason, request.stop_reason = reason, stop_reason
            return
        request.finish_reason, request.stop_reason = reason, stop_reason
        request.finished = time.monotonic()
        was, request.status = request.status, Status.FINISHED
        if was is Status.WAITING:
            self.waiting.remove(request)
            self._forget(request)
        elif was is Status.RUNNING:
            self.running.remove(request)
            self._leave_when_idle(request)

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks away; it waits at the head of the queue and computes them again."""
        self.num_preemptions += 1
        request.num_preemptions += 1
        request.status = Status.PREEMPTED
        self.running.remove(request)
        self._leave_when_idle(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._leaving or self.kv.busy)

    def slots(self) -> tuple[int, int]:
        """Token slots in the blocks of running requests, and how many have a token once launched steps end."""
        held = sum(len(self.kv.table(r.request_id)) for r in self.running) * self.kv.block_size
        return held, sum(r.num_computed for r in self.running)

    def check(self) -> None:
        """Assert what must hold between any two steps."""
        self.kv.check()
        assert len(self.running) <= self.config.max_num_seqs
        assert all(r.status is Status.RUNNING for r in self.running)
        assert all(r.status is Status.WAITING and r.in_flight == 0 for r in self.waiting)
        assert all(r.in_flight > 0 for r in self._leaving)

    # Choosing

    def _ready(self, request: Request) -> bool:
        """Whether the request may take another step before its pending token, if any, is known."""
        if request.pending == 0:
            return True
        if request.lockstep:
            return False
        limit = request.params.max_tokens
        at_end = request.num_tokens >= self.config.max_model_len or (limit is not None and request.num_output >= limit)
        return not at_end

    def _take(self, request: Request, count: int) -> StepItem:
        """Put the request's next `count` tokens into the step."""
        start = request.num_computed
        end = start + count
        samples = end == request.num_tokens
        phase = Phase.DECODE if samples and count == 1 else Phase.PREFILL
        if not request.run_id:
            self._announce(request)
        # While a prompt is computed or restored, and where blocks lie in host memory, entries change anywhere.
        changed = phase is Phase.PREFILL or request.restoring or request.long
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
            score_prompt=start < request.num_prompt - 1 and _needs_prompt_logits(request),
            host_blocks=self.kv.cold(request.request_id) if request.long else (),
        )
        request.blocks_sent = len(tables[0])
        request.num_computed = end
        request.in_flight += 1
        request.pending += samples
        return item

    def _announce(self, request: Request) -> None:
        """Tell the runner of a request that it does not know, or knows no more."""
        request.run_id, request.blocks_sent = next(self._run_ids), 0
        self._by_run_id[request.run_id] = request
        self._new.append(NewRequest(request.run_id, tuple(request.token_ids), request.num_prompt, request.params,
                                    request.seed, tuple(request.stop_ids), request.grammar is not None))

    def _make_room(self, request: Request, num_tokens: int, items: list[StepItem]) -> bool:
        """Blocks for the request's first `num_tokens`, preempting later ones where they are short."""
        urgent = bool(request.num_output)
        while not self.kv.extend(request.request_id, num_tokens, urgent):
            needed = self.kv.blocks_needed(request.request_id, num_tokens)
            if self.kv.loans.grow(needed - self.kv.num_free):
                continue
            coming = self.kv.settling or needed <= self.kv.num_free
            if self._leaving or coming:  # blocks are about to come free: wait for them rather than preempt more
                return False
            if len(self.running) == 1 and self.kv.let_go_of_twins(request.request_id):
                continue
            if len(self.running) == 1 and self.kv.store is not None:
                self._lengthen(request)
                return False
            taken = {item.id for item in items}
            victim = next(r for r in self._by_importance(reverse=True) if r.run_id not in taken)
            assert victim is not request or len(self.running) > 1, "one request alone must always fit"
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
            if len(self.running) + len(self._leaving) >= self.config.max_num_seqs:
                break
            if self._waits_for_leader(request) or self._is_sought(request):
                continue
            covered = self._begin(request)
            count = min(request.num_tokens - covered, budget)
            whole = self.config.chunked_prefill or count == request.num_tokens - covered
            needed = min(self.kv.blocks_needed(request.request_id, request.num_tokens),
                         self.kv.peak_blocks(request.num_tokens, self._chunk))
            if not self.running:  # a sequence longer than the device goes alone, and what does not fit is moved out
                needed = min(needed, self.kv.num_total)
            spare = self.kv.num_free - outstanding - (self._watermark_blocks if self.running else 0)
            if whole and needed > spare and self.kv.loans.grow(needed - spare):
                spare = self.kv.num_free - outstanding - (self._watermark_blocks if self.running else 0)
            if not whole or needed > spare:
                self.kv.release(request.request_id)
                break
            stored = self._restore(request, covered)
            if stored is None:
                self.kv.release(request.request_id)
                break
            count = min(count, stored - covered) if request.restoring else count
            if not self.kv.extend(request.request_id, covered + count, urgent=False):
                self.kv.release(request.request_id)
                request.restoring = False
                break
            self._forget(request)
            self.waiting.remove(request)
            self.running.append(request)
            self._enter(request, covered)
            if count:
                items.append(self._take(request, count))
            outstanding += self.kv.blocks_needed(request.request_id, request.num_tokens)
            budget -= count
        self._forming = False

    def _may_admit(self) -> bool:
        """Static batching takes requests in only while it forms a batch, and forms one only when the last has ended."""
        if any(r.long for r in self.running):
            return False
        if not self.config.static_batching:
            return True
        self._forming |= not self.running and not self._leaving
        return self._forming

    def _match(self, request: Request) -> int:
        return 0 if _needs_prompt_logits(request) else self.kv.match(request.token_ids, request.cache_salt)

    def _waits_for_leader(self, request: Request) -> bool:
        """Siblings share the prompt's blocks, so they start when the leader has computed them."""
        leader = request.leader
        return (leader is not None and leader.status in (Status.WAITING, Status.RUNNING, Status.PREEMPTED)
                and not leader.output_token_ids)

    def _begin(self, request: Request) -> int:
        if _needs_prompt_logits(request):
            return self.kv.admit(request.request_id, [], request.cache_salt)
        leader = request.leader
        if leader is not None and leader.status is Status.RUNNING and request.num_preemptions == 0:
            return self.kv.fork(leader.request_id, request.request_id, request.num_prompt - 1)
        return self.kv.admit(request.request_id, request.token_ids, request.cache_salt)

    def _enter(self, request: Request, covered: int) -> None:
        request.status = Status.RUNNING
        request.num_computed = covered
        if request.sources is None:  # a preempted request keeps the count of its first admission
            self.kv.count_query(request.request_id)
            hit = min(covered, request.num_prompt)
            request.sources = TokenSources(computed=request.num_prompt - hit, device=hit)
            request.scheduled = time.monotonic()

    # Blocks in other tiers

    def _seek(self, request: Request) -> None:
        """Asks the other tiers for a request's blocks while it waits, and starts to bring them nearer."""
        if self.config.restore != "never" and not _needs_prompt_logits(request):
            self.kv.seek(request.request_id, request.token_ids, request.cache_salt)

    def _is_sought(self, request: Request) -> bool:
        """Whether a tier has still to say what it holds; others go first."""
        restorer = self.kv.restorer
        return restorer is not None and not restorer.ready(request.request_id, time.monotonic())

    def _forget(self, request: Request) -> None:
        if self.kv.restorer is not None:
            self.kv.restorer.forget(request.request_id)

    def _restore(self, request: Request, covered: int) -> int | None:
        """Starts loading what is worth it; returns up to which token the request is to be computed meanwhile, or None
        if there is no room yet."""
        store, size = self.kv.store, self.kv.block_size
        if store is None or self.config.restore == "never" or request.computes_all or _needs_prompt_logits(request):
            return request.num_tokens
        have = covered // size
        sources = self.kv.stored(request.request_id, request.token_ids, request.cache_salt)
        room = self.kv.num_total // len(self.kv.windows) - have - 1
        sources = sources[:max(0, room)]
        plain = all(window is None for window in self.kv.windows)
        mode = self.config.restore if self.prefill_seconds is not None else "always"
        first = first_to_load(sources, mode, store.seconds, (self.prefill_seconds or 0.0) * size, self.step_seconds,
                              plain)
        if first == len(sources):
            return request.num_tokens
        if not self.kv.restore(request.request_id, sources[first:], have + first):
            return None
        request.restoring = True
        request.restore_started = time.monotonic()
        return covered + first * size

    def _take_over(self, request: Request) -> None:
        """What has been loaded so far counts as computed; a restore that cannot end is given up."""
        now = time.monotonic()
        restore = self.kv.restoring(request.request_id)
        if restore is None:
            request.restoring = False
            return
        if restore.broken(now):
            request.computes_all = True
            self.preempt(request)
            return
        size = self.kv.block_size
        if request.num_computed % size == 0:
            before = dict(restore.skipped)
            request.num_computed = restore.skip(request.num_computed // size) * size
            for tier, blocks in restore.skipped.items():
                self._count_source(request, tier, (blocks - before.get(tier, 0)) * size)
        if not restore.pending and request.restore_ended == 0.0:
            request.restore_ended = now
        if request.num_computed >= restore.end * size:
            request.restoring = False

    def _count_source(self, request: Request, tier: str, tokens: int) -> None:
        if not tokens:
            return
        assert self.kv.store is not None
        self.kv.store.count_hit(tier, tokens)
        if request.num_preemptions == 0 and request.sources is not None:
            sources = request.sources
            request.sources = replace(sources, computed=sources.computed - tokens,
                                      **{tier: getattr(sources, tier) + tokens})

    def _to_compute(self, request: Request) -> int:
        """Tokens up to the next block that is loaded, or may yet be."""
        if not request.restoring:
            return request.num_tokens
        restore = self.kv.restoring(request.request_id)
        limit = restore.limit(request.num_computed // self.kv.block_size) if restore is not None else None
        return request.num_tokens if limit is None else max(0, limit * self.kv.block_size - request.num_computed)

    def _lengthen(self, request: Request) -> None:
        """The only request there is has outgrown the device: its oldest blocks move to host memory."""
        if request.in_flight:
            return
        request.long = True
        self.kv.commit(request.request_id, request.token_ids, request.num_computed)  # what was restored is ready too
        if not self.kv.park(request.request_id, self._park_unit):
            self.stop(request, "length")
            self._ended.append(request)

    # Taking in results, and leaving

    def _append(self, request: Request, token: int, now: float) -> None:
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
        self.kv.release(request.request_id)
        if request.run_id:
            del self._by_run_id[request.run_id]
            self._gone.append(request.run_id)
            request.run_id = 0
        if request.status is Status.PREEMPTED:
            request.status = Status.WAITING
            request.num_computed = 0
            request.restoring = request.long = False
            if _needs_prompt_logits(request):
                request.prompt_logprobs.clear()  # its prefill starts over
            self.waiting.appendleft(request)
            self._seek(request)


def _needs_prompt_logits(request: Request) -> bool:
    """Log probabilities of the prompt come from computing it, so no cached prefix may stand in for it."""
    return request.params.prompt_logprobs is not None and len(request.prompt_logprobs) < request.num_prompt - 1
