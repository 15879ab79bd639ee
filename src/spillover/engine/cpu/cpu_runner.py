"""Runs steps on the CPU: lays out the tensors, calls the model, samples the tokens. It does no scheduling.

`launch` returns before the step has completed, so that the next one can be prepared. Steps run in the order of launch,
on a separate thread that stands in for a device's stream. That thread reads the tokens that the previous step sampled
directly, without waiting for the host to process them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from spillover.engine.batch.draft_head import DraftHead, FeatureReader
from spillover.engine.batch.offloaded_prefix import OffloadStage
from spillover.engine.batch.request_table import StepLimits
from spillover.engine.batch.sampler import GREEDY, SampledLogprobs, SamplingBatch, sample
from spillover.engine.batch.step_layout import ItemArrays, StepArrays, write_decodes, write_step
from spillover.engine.batch.step_result import (
    PromptObserver,
    PromptRows,
    decode_result,
    prompt_rows,
    sampling_batch,
    score,
    to_result,
)
from spillover.engine.step import DraftItem, HeadDrafts, Step, StepResult
from spillover.engine.weights.placed import EngineWeights, FixedWeights
from spillover.engine.weights.traffic import WeightTraffic
from spillover.kernels import native
from spillover.kernels.batch import AttentionBatch
from spillover.memory.transfer.transfers import Transfers
from spillover.models.layers import Decoder, KVViews, ModelStep

Changed = TypeVar("Changed")
NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class _Work:
    """A step as tensors, and as arrays in the same memory."""

    step: ModelStep
    arrays: StepArrays
    decodes: bool  # whether the step only decodes
    sampling: SamplingBatch | None  # None if no token is sampled
    prompt_rows: tuple[PromptRows, ...]


@dataclass(frozen=True)
class _Outcome:
    drawn: npt.NDArray[np.int64]  # [R]
    logprobs: SampledLogprobs | None
    prompt: tuple[list[SampledLogprobs], ...]  # parallel to the work's prompt_rows


class LaunchedStep:
    """A launched step; `result` waits for it."""

    def __init__(self, step: Step, work: _Work, outcome: Future[_Outcome], runner: CpuRunner) -> None:
        self.step = step
        self._work = work
        self._outcome = outcome
        self._runner = runner

    def wait(self) -> None:
        self._outcome.result()

    def done(self) -> bool:
        return self._outcome.done()

    def result(self) -> StepResult:
        outcome, table = self._outcome.result(), self._runner.table
        drawn: list[int] = outcome.drawn.tolist()
        if self._work.decodes and outcome.logprobs is None:
            return decode_result(self.step, table, drawn)
        if self._runner.model.ranks.rank:  # other ranks than 0 get only the tokens
            return to_result(self.step, table, drawn, None, (), (), None)
        return to_result(self.step, table, drawn, outcome.logprobs, self._work.prompt_rows, outcome.prompt,
                         self._runner.decode)


class CpuRunner:
    def __init__(self, model: Decoder, weights: EngineWeights, kv: KVViews, block_size: int, limits: StepLimits,
                 transfers: Transfers, decode: Callable[[int], str] | None = None, kv_dtype: str = "auto",
                 stage: OffloadStage | None = None, shared_with: CpuRunner | None = None) -> None:
        """Make the runner. `stage`: the buffers that offloaded blocks of sequences longer than the pool pass through.
        `shared_with`: a runner that shares the device with this one, so that their steps run one after another."""
        self.model = model
        self.weights = weights
        self.kv = kv
        self.decode = decode
        self.observe: PromptObserver | None = None
        self.transfers = transfers
        self.drafting: CpuRunner | None = None  # runner of the model that drafts, made of substitutes
        self.head: DraftHead | None = None  # head that drafts from this model's hidden states
        self.feature_reader: FeatureReader | None = None  # reads hidden states: the head, or the training of a head
        self.table = limits.request_table(len(model.groups), block_size, torch.device("cpu"))
        self._block_tables: npt.NDArray[np.int32] = self.table.block_tables.numpy()  # [groups, slots, width]
        self._block_size = block_size
        self._kv_dtype = kv_dtype
        self._stage = stage
        self._stack = model.stack(weights, kv) if isinstance(weights, FixedWeights) else None
        self._drawn: npt.NDArray[np.int64] = NOTHING  # [R], tokens of the last executed step that sampled any
        self._stream: ThreadPoolExecutor = (shared_with._stream if shared_with is not None
                                            else ThreadPoolExecutor(1, "spillover-step"))
        self._num_launched = 0
        self._num_executed = 0
        self._unset_outcome: Callable[[], None] | None = None  # sets the last executed step's outcome; None: done

    def launch(self, step: Step) -> LaunchedStep:
        work, outcome = self.lay_out(step), Future[_Outcome]()
        self._stream.submit(self._run, work, outcome)
        self._num_launched += 1
        return LaunchedStep(step, work, outcome, self)

    def add_head(self, head: DraftHead) -> None:
        self.head = self.feature_reader = head
        self.table.tracks_rows = True

    def draft(self, items: Sequence[DraftItem], wait: bool = True) -> HeadDrafts:
        """Draft with the head, in one pass per token of the longest draft; tokens are returned also without `wait`."""
        found, slots, updates = self.table.begin_drafts(items)
        if not found:
            return HeadDrafts([()] * len(items))
        self._block_tables[0].reshape(-1)[updates.places] = updates.blocks
        drafted_items = [items[index] for index in found]
        tokens = [self.table[item.id].token_ids[item.start] for item in drafted_items]
        drafts: list[tuple[int, ...]] = [()] * len(items)
        drafted = self._stream.submit(self._draft, drafted_items, slots, tokens, self._block_tables[0, slots]).result()
        for index, draft in zip(found, drafted, strict=True):
            drafts[index] = draft
        return HeadDrafts(drafts)

    def in_order(self, change: Callable[[], Changed]) -> Changed:
        """Run a change to the device's memory after all steps launched so far and before any later step."""
        return self._stream.submit(change).result()

    def sleep(self, blocks: Sequence[int]) -> None:
        """Do nothing: the device is the host."""

    def wake_up(self) -> None:
        pass

    @property
    def weight_bytes(self) -> int:
        drafting = sum(each.weights.nbytes for each in (self.drafting, self.head) if each is not None)
        return self.weights.nbytes + drafting

    def weight_traffic(self) -> WeightTraffic:
        return self.weights.traffic()

    def close(self) -> None:
        self._stream.shutdown()
        self.weights.close()
        self.transfers.close()

    def lay_out(self, step: Step) -> _Work:
        slots, updates = self.table.begin(step)
        for request in step.new:  # clear entries of the request that had the slot before
            self._block_tables[:, self.table[request.id].slot] = 0
        if len(updates.blocks):
            self._block_tables.reshape(-1)[updates.places] = updates.blocks
        items = ItemArrays.of(step.items, slots)
        decodes = items.only_decodes
        if decodes:
            arrays = StepArrays.decodes(len(slots))
            write_decodes(arrays, items, self.table)
        else:
            arrays = StepArrays.empty(items.num_rows, len(slots), items.num_samples)
            write_step(arrays, items, self.table)
        drawn = slots if decodes else np.repeat(slots, items.samples)
        self.table.set_draws(slots, drawn)
        self.table.set_rows(slots, items.starts, items.counts)
        tensor = torch.from_numpy
        query_start, seq_lens = tensor(arrays.query_start), tensor(arrays.seq_lens)
        positions, rows = tensor(arrays.positions), tensor(arrays.row_of)
        longest = int(arrays.seq_lens.max())
        width = -(-longest // self._block_size)
        offloaded = self._stage.prefix(step.items[0]) if step.items[0].host_blocks and self._stage else None
        attention = tuple(
            AttentionBatch(
                query_start=query_start,
                seq_lens=seq_lens,
                block_table=tensor(block_table[slots, :width]),
                positions=positions,
                rows=rows,
                block_size=self._block_size,
                kv_dtype=self._kv_dtype,
                offloaded=offloaded,
            )
            for block_table in self._block_tables
        )
        return _Work(
            step=ModelStep(tensor(arrays.token_ids), positions, attention),
            arrays=arrays,
            decodes=decodes,
            sampling=self._sampling(step, arrays, drawn),
            prompt_rows=prompt_rows(step, self.table, torch.device("cpu")),
        )

    def _sampling(self, step: Step, arrays: StepArrays, drawn: npt.NDArray[np.int64]) -> SamplingBatch | None:
        """Return the sampler's inputs, None if nothing is sampled; `drawn`: the slot of each sampled row."""
        if not len(drawn):
            return None
        if self.model.ranks.rank:  # rank 0 samples for all
            return GREEDY
        if not self.table.plain[drawn].all():
            return sampling_batch(step.items, self.table, self.model.config.vocab_size, torch.device("cpu"))
        if not arrays.temperature.any():
            return GREEDY
        return SamplingBatch(False, torch.from_numpy(arrays.temperature), torch.from_numpy(arrays.uniform))

    def _run(self, work: _Work, outcome: Future[_Outcome]) -> None:
        """Execute a step. If another step is launched, the outcome is set only when that step's layers run: one thread
        at a time runs Python, so the host's work on the outcome would delay the start of the next step."""
        try:
            set_outcome = partial(outcome.set_result, self._execute(work))
        except BaseException as error:
            set_outcome = partial(outcome.set_exception, error)
        self._set_outcome()  # sets the previous step's outcome, if this step failed before its layers ran
        self._unset_outcome = set_outcome
        self._num_executed += 1
        if self._num_executed >= self._num_launched:
            self._set_outcome()

    def _set_outcome(self) -> None:
        set_outcome, self._unset_outcome = self._unset_outcome, None
        if set_outcome is not None:
            set_outcome()

    @torch.inference_mode()
    def _execute(self, work: _Work) -> _Outcome:
        arrays = work.arrays
        pending = (arrays.sources >= 0).nonzero()[0]
        if len(pending):
            arrays.token_ids[pending] = self._drawn[arrays.sources[pending]]
        hidden = self._forward(work)  # [T, H]
        drawn, logprobs = NOTHING, None
        if work.sampling is not None:
            every = len(arrays.sample_rows) == len(hidden)
            rows = hidden if every else hidden[torch.from_numpy(arrays.sample_rows)]  # [R, H]
            logits = self.model.logits(rows, self.weights)  # [R, V]
            ranks = self.model.ranks
            if ranks.rank == 0:
                with native.record("sampling"):
                    sampled = sample(logits, work.sampling)
                token_ids, logprobs = sampled.token_ids, sampled.logprobs
            else:
                token_ids = torch.empty(len(rows), dtype=torch.int64)
            ranks.broadcast(token_ids)
            self._drawn = drawn = token_ids.numpy()
        prompt = tuple(score(self.model, self.weights, hidden, rows, self.observe) for rows in work.prompt_rows)
        return _Outcome(drawn, logprobs, prompt)

    def _forward(self, work: _Work) -> torch.Tensor:
        reader, step = self.feature_reader, work.step
        if reader is None:
            return self.model.forward_stacked(step, self.weights, self.kv, self._stack, self._set_outcome)
        features, taps = reader.taps(len(step.token_ids))
        hidden = self.model.forward_stacked(step, self.weights, self.kv, self._stack, self._set_outcome, taps)
        reader.observe(step.token_ids, features, step.attention[0], torch.from_numpy(work.arrays.slots),
                      torch.from_numpy(work.arrays.follows))
        return hidden

    @torch.inference_mode()
    def _draft(self, items: Sequence[DraftItem], slots: npt.NDArray[np.int64], tokens: Sequence[int],
               block_table: npt.NDArray[np.int32]) -> list[tuple[int, ...]]:
        """Run the head's passes, each over the requests with incomplete drafts. `tokens`: the requests' newest."""
        head = self.head
        assert head is not None
        order = sorted(range(len(items)), key=lambda index: -items[index].count)  # complete drafts drop off the end
        starts = np.array([items[index].start for index in order], dtype=np.int64)
        table = block_table[order]
        ids = torch.tensor([tokens[index] for index in order])
        before = head.first(torch.tensor([head.kept.place(int(slots[index]), items[index].start - 1)
                                          for index in order]))
        drafts: list[list[int]] = [[] for _ in items]
        for done in range(items[order[0]].count):
            active = sum(items[index].count > done for index in order)
            positions = starts[:active] + done
            numbers = torch.arange(active + 1, dtype=torch.int32)
            longest = int(positions.max()) + 1
            batch = AttentionBatch(
                query_start=numbers, seq_lens=torch.from_numpy((positions + 1).astype(np.int32)),
                block_table=torch.from_numpy(np.ascontiguousarray(table[:active, :-(-longest // self._block_size)])),
                positions=torch.from_numpy(positions), rows=numbers[:active], block_size=self._block_size,
                kv_dtype=self._kv_dtype)
            logits, before = head.draft(ids[:active], before[:active], batch)
            ids = head.tokens(logits.argmax(-1))
            for index, token in zip(order, ids.tolist(), strict=False):
                drafts[index].append(token)
        return [tuple(draft) for draft in drafts]
