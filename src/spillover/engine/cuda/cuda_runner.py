"""Runs steps on a CUDA device: launching never waits for the device, and most steps are replayed from CUDA graphs.

A step copies its inputs from pinned memory, runs the model, samples tokens, writes them to pinned memory and records an
event; the host waits only for that event, when it needs the result.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spillover.engine.batch.draft_head import DraftHead, FeatureReader
from spillover.engine.batch.offloaded_prefix import OffloadStage
from spillover.engine.batch.request_table import StepLimits
from spillover.engine.batch.sampler import GREEDY, SampledLogprobs, SamplingBatch, sample
from spillover.engine.batch.step_layout import ItemArrays
from spillover.engine.batch.step_result import (
    PromptObserver,
    PromptRows,
    decode_result,
    prompt_rows,
    sampling_batch,
    score,
    to_device,
    to_result,
)
from spillover.engine.cuda.decode_inputs import UPDATE_BYTES
from spillover.engine.cuda.draft_passes import DraftPasses, Drafts
from spillover.engine.cuda.graphs import Graphs, GraphStats, Key
from spillover.engine.cuda.sleeping_kv import SleepingKV
from spillover.engine.cuda.step_inputs import HEADER, InputOffsets, StepShape, table_updates
from spillover.engine.cuda.step_writer import StepWriter
from spillover.engine.step import DraftItem, HeadDrafts, Step, StepItem, StepResult
from spillover.engine.weights.placed import EngineWeights
from spillover.engine.weights.traffic import WeightTraffic
from spillover.kernels.batch import AttentionBatch, DecodeScratch, DeviceWork
from spillover.kernels.triton.attention import ordered_splits
from spillover.kernels.triton.draw import draw
from spillover.kernels.triton.step_upload import fill_tokens, update_tables
from spillover.memory.transfer.cuda_transfers import CudaTransfers
from spillover.models.layers import Decoder, KVViews, ModelStep

FEW_UPDATES = UPDATE_BYTES // 8 - 4  # most block table entries that are sent with a step; more are copied separately
STEPS_KEPT = 4  # maximum number of results that are in flight to the host, or have arrived and are not read yet

i32, i64 = torch.int32, torch.int64
Changed = TypeVar("Changed")


@dataclass(frozen=True)
class _Work:
    offsets: InputOffsets
    num_samples: int
    sampling: SamplingBatch | None  # None: every row is sampled by temperature alone
    decodes: bool  # whether every request has one row, which is sampled from
    key: Key | None  # key of the step's CUDA graph, captured now if it does not exist; None: the step has no graph
    prompts: tuple[PromptRows, ...]
    drafts: Drafts | None  # drafts that the step verifies and the host does not have yet; None: there are none


class CudaStep:
    """A launched step; `result` waits for its last write."""

    def __init__(self, step: Step, work: _Work, drawn: npt.NDArray[np.int64], logprobs: SampledLogprobs | None,
                 scored: tuple[list[SampledLogprobs], ...], ended: torch.cuda.Event | None, runner: CudaRunner) -> None:
        self.step = step
        self._work = work
        self._drawn = drawn
        self._logprobs = logprobs
        self._scored = scored
        self._ended = ended
        self._runner = runner

    def wait(self) -> None:
        if self._ended is not None:
            self._ended.synchronize()

    def done(self) -> bool:
        return self._ended is None or bool(self._ended.query())  # type: ignore[no-untyped-call]

    def result(self) -> StepResult:
        self.wait()
        work, table = self._work, self._runner.table
        self._runner.weights.graphs.end_step(work.offsets.shape.rows)
        drawn: list[int] = self._drawn[:work.num_samples].tolist()
        if work.decodes and self._logprobs is None:
            return decode_result(self.step, table, drawn)
        if self._runner.model.ranks.rank:  # ranks other than 0 receive only the sampled tokens
            return to_result(self.step, table, drawn, None, (), (), None)
        drafts = {} if work.drafts is None else work.drafts.tokens()
        return to_result(self.step, table, drawn, self._logprobs, work.prompts, self._scored, self._runner.decode,
                         drafts)


class CudaRunner:
    def __init__(self, model: Decoder, weights: EngineWeights, kv: KVViews, block_size: int, device: torch.device,
                 limits: StepLimits, transfers: CudaTransfers, decode: Callable[[int], str] | None = None,
                 kv_dtype: str = "auto",
                 stage: OffloadStage | None = None, graphs: bool = True, shared_with: CudaRunner | None = None) -> None:
        """Make the runner. `stage`: the buffer through which the offloaded blocks of sequences longer than the pool
        pass. `shared_with`: another runner on the same device, whose stream this one shares because kernels keep
        counters that concurrent launches must not use."""
        config, groups = model.config, len(model.groups)
        self.model = model
        self.weights = weights
        self.kv = kv
        self.decode = decode
        self.observe: PromptObserver | None = None
        self.transfers = transfers
        self.table = limits.request_table(groups, block_size, device)
        self.drafting: CudaRunner | None = None  # the draft model's runner, which sleeps together with this one
        self.head: DraftHead | None = None  # an EAGLE-3 head that drafts from this model's hidden states
        self.feature_reader: FeatureReader | None = None  # reads hidden states: the head, or the training of a head
        self._passes: DraftPasses | None = None  # the drafting passes of the head
        self._asleep: SleepingKV | None = None
        self._block_size = block_size
        self._device = device
        self._kv_dtype = kv_dtype
        self._stage = stage
        self._limits = limits
        self._writer = StepWriter(model, limits, self.table, device)
        self._inputs = self._writer.inputs
        requests = limits.max_num_seqs + 1
        items = ordered_splits.max_items(requests, limits.max_model_len, config.num_kv_heads)
        self._scratch = DecodeScratch.make(items, requests, config.num_heads, config.num_kv_heads, config.head_dim,
                                           device)
        samples = limits.max_samples
        # Tokens sampled in the last step, followed by the tokens that a head drafted: [passes, requests].
        self._draws = torch.zeros(samples + limits.draft_tokens * limits.max_num_seqs, dtype=i64, device=device)
        self._drawn_from = torch.zeros(samples, config.hidden_size, dtype=model.dtype, device=device)
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(device)  # the tensors above were created on the default stream
        self._queue: torch.cuda.Stream | None = shared_with._queue if shared_with is not None else None
        if cuda and shared_with is None:
            self._queue = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._results = torch.zeros(STEPS_KEPT, samples, dtype=i64, pin_memory=cuda)
        self._read: npt.NDArray[np.int64] = self._results.numpy()
        self._result_row = 0  # the row of the results that a step's tokens are written to
        self._graphs = (Graphs(device, limits.max_num_seqs, limits.captured_rows, bool(limits.draft_tokens))
                        if graphs else None)
        # Freeze all objects created so far: scanning them in later garbage collections would stall a step.
        gc.collect()
        gc.freeze()

    def launch(self, step: Step) -> CudaStep:
        # Steps run on a separate stream, because the default stream cannot be captured.
        with torch.inference_mode(), torch.cuda.stream(self._queue):
            return self._launch(step)

    def add_head(self, head: DraftHead) -> None:
        self.head = self.feature_reader = head
        self.table.tracks_rows = True
        self._passes = DraftPasses(head, self.table, self._limits, self._block_size, self._kv_dtype, self._draws)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the head was created on the default stream

    def draft(self, items: Sequence[DraftItem], wait: bool = True) -> HeadDrafts:
        """Draft with the head, in one pass per token of the longest draft."""
        assert self._passes is not None, "there is no head"
        with torch.inference_mode(), torch.cuda.stream(self._queue):
            return self._passes.draft(items, self._graphs, wait)

    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture the graphs of plain steps now, on padding alone; the largest first, as all share its memory."""
        if self._graphs is None:
            return
        few = self.weights.graphs.max_unpadded_rows
        sizes = [*range(1, few + 1), *(size for size in self._graphs.sizes if size > few)]
        keys = [Key(size, True) for size in sizes] + [Key(size, False, True) for size in self._graphs.prompt_sizes]
        if self._limits.draft_tokens:
            keys += [Key(size, True, True) for size in self._graphs.prompt_sizes if size <= self._limits.max_samples]
        # Graphs of steps that stream weights are valid for one placement only; they are captured when such a step runs.
        keys = [key for key in keys if self.weights.graphs.graph_version(key.rows) == 0]
        nothing = ItemArrays.of((), np.empty(0, dtype=np.int64))
        with torch.inference_mode(), torch.cuda.stream(self._queue):
            for done, key in enumerate(sorted(keys, reverse=True)):
                if progress is not None:
                    progress(done, len(keys))
                self.weights.graphs.begin_step(key.rows)
                shape = self._writer.prompt_shape(key.rows) if key.prompts else StepShape.decodes(key.rows)
                offsets, _ = self._writer.send(nothing, shape, False, self._result_row)
                self._graphs.run(key, partial(self._captured, offsets, key), at_once=True)
            if self._passes is not None:
                self._passes.capture(self._graphs)

    @property
    def graph_stats(self) -> GraphStats | None:
        return self._graphs.stats if self._graphs is not None else None

    def in_order(self, change: Callable[[], Changed]) -> Changed:
        """Change the device's memory, ordered after all steps launched so far and before all later ones."""
        with torch.inference_mode(), torch.cuda.stream(self._queue):
            return change()

    def forget_graphs(self) -> None:
        """Drop all graphs, which contain addresses of weights and KV; they are captured again when they are needed."""
        if self._graphs is not None:
            self._graphs.clear()

    def sleep(self, blocks: Sequence[int]) -> None:
        """Move weights and the KV of these blocks to the host. No step may be in flight."""
        self.forget_graphs()
        # KV moves first: slots of experts may share its memory.
        self._asleep = SleepingKV(self.kv.pool, blocks, self.transfers)
        self.weights.move(self.transfers.to_host, asleep=True)
        if self.drafting is not None:
            self.drafting.forget_graphs()
        for each in (self.drafting, self.head):
            if each is not None:
                each.weights.move(self.transfers.to_host, asleep=True)
        torch.cuda.empty_cache()

    def wake_up(self) -> None:
        if self._asleep is not None:
            self.weights.move(self.transfers.to_device, asleep=False)
            for each in (self.drafting, self.head):
                if each is not None:
                    each.weights.move(self.transfers.to_device, asleep=False)
            self._asleep.wake_up()
            self._asleep = None

    @property
    def weight_bytes(self) -> int:
        drafting = sum(each.weights.nbytes for each in (self.drafting, self.head) if each is not None)
        return self.weights.nbytes + drafting

    def weight_traffic(self) -> WeightTraffic:
        return self.weights.traffic()

    def close(self) -> None:
        """Stop, and free the device's memory even if references to the engine remain."""
        gc.unfreeze()
        self.weights.close()
        self.transfers.close()
        if self._device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # the device may have failed
                self._free()

    def _free(self) -> None:
        torch.cuda.synchronize(self._device)
        self.forget_graphs()
        self.kv.pool.untyped_storage().resize_(0)
        for each in (self, self.drafting, self.head):
            if each is not None:
                each.weights.move(partial(torch.empty_like, device="meta"), asleep=True)
        torch.cuda.empty_cache()

    # On the device

    def _launch(self, step: Step) -> CudaStep:
        work = self.lay_out(step)
        logprobs: SampledLogprobs | None = None
        scored: tuple[list[SampledLogprobs], ...] = ()
        rows: Tensor | None
        if work.key is not None:
            assert self._graphs is not None
            rows = self._graphs.run(work.key, partial(self._captured, work.offsets, work.key))
        else:
            hidden = self._forward(work.offsets, step.items[0])
            scored = tuple(score(self.model, self.weights, hidden, part, self.observe) for part in work.prompts)
            rows = hidden[self._inputs.array(work.offsets, "sample_rows")]
        if work.sampling is not None:
            assert rows is not None
            logits, draws = self.model.logits(rows[:work.num_samples], self.weights), self._draws[:work.num_samples]
            if self.model.ranks.rank == 0:
                sampled = sample(logits, work.sampling)
                draws.copy_(sampled.token_ids)
                logprobs = sampled.logprobs
            self.model.ranks.broadcast(draws)
        elif (work.key is None or not work.key.draws) and work.num_samples:
            assert rows is not None
            self._draw(work.offsets, rows, work.num_samples)
        return self._send_back(step, work, logprobs, scored)

    def _captured(self, offsets: InputOffsets, key: Key) -> Tensor:
        """Run the part of a step that its graph contains; return the rows that tokens are sampled from."""
        hidden, samples = self._forward(offsets), offsets.shape.samples
        if key.draws:
            self._draw(offsets, hidden, samples)
        elif key.prompts:
            into = self._drawn_from[:samples]
            return torch.index_select(hidden, 0, self._inputs.array(offsets, "sample_rows"), out=into)
        return hidden

    def _draw(self, offsets: InputOffsets, rows: Tensor, count: int) -> None:
        """Sample by temperature alone."""
        inputs, logits = self._inputs, self.model.logits(rows[:count], self.weights)
        if self.model.ranks.rank == 0:
            draw(logits, inputs.array(offsets, "temperature")[:count], inputs.array(offsets, "uniform")[:count],
                 self._draws, self._results, inputs.view(offsets.result_row, i32, 1))
        self.model.ranks.broadcast(self._draws[:count])

    def _forward(self, offsets: InputOffsets, item: StepItem | None = None) -> Tensor:
        """Run the model on the inputs at `offsets`; `item` matters only if its sequence is longer than the pool."""
        token_ids = self._inputs.array(offsets, "token_ids")
        fill_tokens(token_ids, self._inputs.array(offsets, "sources"), self._draws)
        model_step = self._model_step(offsets, token_ids)
        if item is not None and item.host_blocks:
            model_step = self._offloaded_step(model_step, item)
        reader = self.feature_reader
        if reader is None:
            return self.model.forward(model_step, self.weights, self.kv)
        features, taps = reader.taps(len(token_ids))
        hidden = self.model.forward(model_step, self.weights, self.kv, taps)
        reader.observe(token_ids, features, model_step.attention[0], self._inputs.array(offsets, "slots"),
                      self._inputs.array(offsets, "follows"))
        return hidden

    def _model_step(self, offsets: InputOffsets, token_ids: Tensor) -> ModelStep:
        inputs, shape = self._inputs, offsets.shape
        positions, slots = inputs.array(offsets, "positions"), inputs.array(offsets, "slots")
        batches = []
        for group in range(len(self.model.groups)):
            start, short = offsets.work[group], offsets.short[group]
            fields = ordered_splits.FIELDS
            work = DeviceWork(
                splits=inputs.view(start + 4 * HEADER, i32, (offsets.work_size - HEADER) // fields, fields),
                num_splits=inputs.view(start, i32, 1),
                tiles=inputs.view(offsets.tiles, i32, shape.tiles, 2) if shape.tiles else None,
                slots=slots,
                scratch=self._scratch,
                short=inputs.view(short + 4 * HEADER, i32, shape.short, fields) if shape.short else None,
                num_short=inputs.view(short, i32, 1) if shape.short else None,
            )
            batches.append(AttentionBatch(
                query_start=inputs.array(offsets, "query_start"),
                seq_lens=inputs.array(offsets, "seq_lens"),
                block_table=self.table.block_tables[group],
                positions=positions,
                rows=inputs.array(offsets, "row_of"),
                block_size=self._block_size,
                kv_dtype=self._kv_dtype,
                work=work,
            ))
        return ModelStep(token_ids, positions, tuple(batches))

    def _offloaded_step(self, model_step: ModelStep, item: StepItem) -> ModelStep:
        """Return the step of one request longer than the pool, with its first blocks read through the stage."""
        assert self._stage is not None, "the plan has no sequences longer than the pool"
        (batch,), slot = model_step.attention, self.table[item.id].slot
        offloaded = replace(batch, block_table=self.table.block_tables[0, slot:slot + 1],
                            offloaded=self._stage.prefix(item),
                            work=None)
        return replace(model_step, attention=(offloaded,))

    # On the host

    def lay_out(self, step: Step) -> _Work:
        """Write the step's inputs, send them to the device and choose its graph."""
        self._result_row = (self._result_row + 1) % STEPS_KEPT
        table = self.table
        slots, updates = table.begin(step)
        items = ItemArrays.of(step.items, slots)
        prompts = prompt_rows(step, table, self._device)
        offloaded = bool(step.items[0].host_blocks)
        decodes = items.only_decodes and not prompts and not offloaded
        drawn = slots if decodes else np.repeat(slots, items.samples)
        plain = bool(table.plain[drawn].all())
        key, shape = self._choose_graph(items, decodes, plain, not prompts and not offloaded)
        few = table_updates(updates) if 0 < len(updates.blocks) <= FEW_UPDATES else None
        offsets, place = self._writer.send(items, shape, decodes, self._result_row, few)
        table.set_draws(slots, drawn)
        table.set_rows(slots, items.starts, items.counts)
        if place is not None:
            sent = self._inputs.view(place, i32, 2 + 2 * len(updates.blocks))
            update_tables(table.block_tables, sent, len(updates.blocks))
        elif len(updates.blocks):
            many = to_device(torch.from_numpy(table_updates(updates)), self._device)
            update_tables(table.block_tables, many, len(updates.blocks))
        if self.model.ranks.rank:  # rank 0 samples for all ranks
            return _Work(offsets, len(drawn), None if plain else GREEDY, decodes, key, prompts, None)
        drafts = None
        if not decodes and self._passes is not None and any(item.draft_on_device for item in step.items):
            drafts = self._passes.last
        sampling = None if plain else sampling_batch(step.items, table, self.model.config.vocab_size, self._device)
        return _Work(offsets, len(drawn), sampling, decodes, key, prompts, drafts)

    def _choose_graph(self, items: ItemArrays, decodes: bool, plain: bool,
                      capturable: bool) -> tuple[Key | None, StepShape | None]:
        """Return the key of the step's graph and the shape that the step is padded to; None, None without a graph."""
        graphs, rows = self._graphs if capturable else None, items.num_rows
        shape = None
        if graphs is not None and decodes:
            shape = StepShape.decodes(rows if rows <= self.weights.graphs.max_unpadded_rows else graphs.size(rows))
        elif graphs is not None and np.count_nonzero(items.counts > 1) <= self._writer.most_several:
            padded = graphs.prompt_size(rows)
            if padded is not None and rows <= self.weights.graphs.max_unpadded_rows:
                padded = rows
            shape = None if padded is None else self._writer.prompt_shape(padded)
        self.weights.graphs.begin_step(rows if shape is None else shape.rows)
        graph_version = None if shape is None else self.weights.graphs.graph_version(shape.rows)
        if shape is None or graph_version is None:
            return None, None
        # The graph can include sampling only if every row is sampled from, in the order of rows.
        draws = plain and (decodes or items.num_rows == items.num_samples) and shape.rows == shape.samples
        return Key(shape.rows, draws, not decodes, graph_version), shape

    def _send_back(self, step: Step, work: _Work, logprobs: SampledLogprobs | None,
                   scored: tuple[list[SampledLogprobs], ...]) -> CudaStep:
        count = work.num_samples
        if work.sampling is not None or self.model.ranks.rank:  # in all other cases draw() has written the results
            self._results[self._result_row, :count].copy_(self._draws[:count], non_blocking=True)
        if logprobs is not None:
            logprobs = logprobs.to_pinned()
        scored = tuple([part.to_pinned() for part in parts] for parts in scored)
        ended = None
        if self._device.type == "cuda":
            ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ended.record()
        return CudaStep(step, work, self._read[self._result_row], logprobs, scored, ended, self)
