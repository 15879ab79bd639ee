"""Runs batches on a CUDA device: nothing in a step waits for it, and all but the largest are replayed from graphs.

A step brings its inputs from pinned memory, runs the model, draws tokens and writes them to pinned memory too, with an
event behind it; the host waits for that event alone, when it asks for the result.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spillover.engine.batch import Batch, ScheduledRequest, StepResult
from spillover.engine.cold_prefix import ColdStage
from spillover.engine.decode_form import UPDATES, DecodeForm
from spillover.engine.graphs import Graphs, GraphStats, Key
from spillover.engine.runner import Changed, PromptRows, Runner, score, to_result
from spillover.engine.sampler import SampledLogprobs, SamplingBatch, random_numbers, sample
from spillover.engine.slots import Slots
from spillover.engine.step_inputs import Places, StepInputs
from spillover.kernels.batch import AttentionBatch, DecodeScratch, DeviceWork
from spillover.kernels.triton.draw import draw
from spillover.kernels.triton.pieces import FIELDS, QUERIES, decode_items, most_items, prefill_tiles
from spillover.kernels.triton.stage import fill_tokens, update_tables
from spillover.models.layers import Decoder, KVViews, ModelStep
from spillover.models.weights import ResidentWeights

FEW_UPDATES = UPDATES // 8 - 4  # table entries that travel with the step; more of them have a copy of their own
MANY_PROMPTS = 32  # requests with several rows, of a step that is recorded
STEPS_KEPT = 4  # results on their way to the host, or there and not read yet

i32, i64, f32, f64 = torch.int32, torch.int64, torch.float32, torch.float64


@dataclass(frozen=True)
class StepLimits:
    """The most of a step, from the plan."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    recorded_rows: int  # of a step with part of a prompt that a graph is recorded of; 0: of none


@dataclass(frozen=True)
class _Shape:
    """What a step is padded to: every step of one key has its arrays in the same places."""

    rows: int
    requests: int
    samples: int
    tiles: int = 0
    piece: int = 1  # rows of a request of padding


@dataclass(frozen=True)
class _Work:
    items: Sequence[ScheduledRequest]
    places: Places
    sampled: list[int]  # items that draw a token
    sampling: SamplingBatch | None  # None: every row is drawn by temperature alone
    decodes: bool  # one row a request, and all of them draw
    key: Key | None  # of its graph, which is there or about to be
    prompt_rows: tuple[PromptRows, ...]


class CudaStep:
    """A launched batch; `result` waits for its last write."""

    def __init__(self, batch: Batch, work: _Work, drawn: npt.NDArray[np.int64], logprobs: SampledLogprobs | None,
                 prompt: tuple[list[SampledLogprobs], ...], ended: torch.cuda.Event | None,
                 decode: Callable[[int], str] | None, weights: ResidentWeights) -> None:
        self.batch = batch
        self._work = work
        self._drawn = drawn
        self._logprobs = logprobs
        self._prompt = prompt
        self._ended = ended
        self._decode = decode
        self._weights = weights

    def result(self) -> StepResult:
        if self._ended is not None:
            self._ended.synchronize()
        work = self._work
        self._weights.end_step(work.places.rows)
        drawn: list[int] = self._drawn[:len(work.sampled)].tolist()
        if work.decodes and self._logprobs is None:
            count = len(drawn)
            return StepResult(list(drawn), [None] * count, [None] * count)
        return to_result(work.items, work.sampled, drawn, self._logprobs, work.prompt_rows, self._prompt, self._decode)


class CudaRunner(Runner):
    def __init__(self, model: Decoder, weights: ResidentWeights, kv: KVViews, block_size: int, device: torch.device,
                 limits: StepLimits, decode: Callable[[int], str] | None = None, kv_dtype: str = "auto",
                 stage: ColdStage | None = None, graphs: bool = True, deterministic: bool = False) -> None:
        """`deterministic`: all attention by the kernel that sums up a row in one order whatever the chunk it is in."""
        super().__init__(model, weights, kv, block_size, device, decode, kv_dtype, stage)
        config, groups = model.config, len(model.groups)
        self._limits = limits
        self._deterministic = deterministic
        self._windows = [group.window for group in model.groups]
        width = -(-limits.max_model_len // block_size) + 1
        self._slots = Slots(2 * limits.max_num_seqs, groups, width, device)
        # Padding beside part of a prompt is cut into requests of its own, each of one tile, in the dummy block.
        self._padding_rows = min(QUERIES, limits.max_model_len)
        self._most_items = most_items(limits.max_num_seqs + 1, limits.max_model_len)
        self._inputs = StepInputs(self._input_bytes(groups), device)
        self._forms: dict[int, DecodeForm] = {}  # of steps that only decode, by rows
        self._scratch = DecodeScratch.make(self._most_items, 2 * limits.max_num_seqs + 1, config.num_heads,
                                           config.num_kv_heads, config.head_dim, device)
        self._draws = torch.zeros(limits.max_num_seqs, dtype=i64, device=device)  # of the last step
        self._drawn_from = torch.zeros(limits.max_num_seqs, config.hidden_size, dtype=model.dtype, device=device)
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(device)  # all that was made so far is made on the default stream
        self._queue = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._results = torch.zeros(STEPS_KEPT, limits.max_num_seqs, dtype=i64, pin_memory=cuda)
        self._read: npt.NDArray[np.int64] = self._results.numpy()
        self._turn = 0  # the row of the results that a step's are written to
        self._graphs = Graphs(device, limits.max_num_seqs, limits.recorded_rows) if graphs else None
        # Everything loaded by now stays: a collection that looked through it again would hold up a step for long.
        gc.collect()
        gc.freeze()

    def launch(self, batch: Batch) -> CudaStep:  # type: ignore[override]
        # A stream of its own: the default one cannot be recorded.
        with torch.inference_mode(), torch.cuda.stream(self._queue):
            return self._launch(batch)

    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Record the graphs of plain steps now, on padding alone; the largest first, whose memory all share."""
        if self._graphs is None:
            return
        few = self.weights.unpadded
        sizes = [*range(1, few + 1), *(size for size in self._graphs.sizes if size > few)]
        keys = [Key(size, True) for size in sizes if self.weights.epoch(size) == 0]
        keys += [Key(size, False, True) for size in self._graphs.prompt_sizes]
        with torch.inference_mode(), torch.cuda.stream(self._queue):
            for done, key in enumerate(sorted(keys, reverse=True)):
                if progress is not None:
                    progress(done, len(keys))
                self.weights.begin_step(key.rows)
                places = self._write_padding(self._prompt_shape(key.rows) if key.prompts else _decode_shape(key.rows))
                self._inputs.send()
                self._graphs.run(key, partial(self._recordable, places, key), at_once=True)

    @property
    def graph_stats(self) -> GraphStats | None:
        return self._graphs.stats if self._graphs is not None else None

    def in_order(self, change: Callable[[], Changed]) -> Changed:
        with torch.inference_mode(), torch.cuda.stream(self._queue):
            return change()

    def forget_graphs(self) -> None:
        """They hold the addresses of weights and KV, and are recorded again when they are needed."""
        if self._graphs is not None:
            self._graphs.clear()

    def sleep(self, blocks: Sequence[int]) -> None:
        self.forget_graphs()
        super().sleep(blocks)

    def close(self) -> None:
        gc.unfreeze()
        super().close()

    def _launch(self, batch: Batch) -> CudaStep:
        work = self._prepare(batch)
        logprobs: SampledLogprobs | None = None
        prompt: tuple[list[SampledLogprobs], ...] = ()
        rows: Tensor | None
        if work.key is not None:
            assert self._graphs is not None
            rows = self._graphs.run(work.key, partial(self._recordable, work.places, work.key))
        else:
            hidden = self._forward(work.places, work.items)
            prompt = tuple(score(self.model, self.weights, hidden, part) for part in work.prompt_rows)
            rows = hidden[self._sample_rows(work.places)]
        if work.sampling is not None:
            assert rows is not None
            sampled = sample(self.model.logits(rows[:len(work.sampled)], self.weights), work.sampling)
            self._draws[:len(work.sampled)].copy_(sampled.token_ids)
            logprobs = sampled.logprobs
        elif (work.key is None or not work.key.draws) and work.sampled:
            assert rows is not None
            self._draw(work.places, rows)
        return self._send_back(batch, work, logprobs, prompt)

    def _recordable(self, places: Places, key: Key) -> Tensor:
        """A step as its graph has it; returns the rows that tokens are drawn from."""
        hidden = self._forward(places)
        if key.prompts:
            return torch.index_select(hidden, 0, self._sample_rows(places), out=self._drawn_from)
        if key.draws:
            self._draw(places, hidden)
        return hidden

    def _draw(self, places: Places, rows: Tensor) -> None:
        """By temperature alone."""
        view, count = self._inputs.view, places.samples
        draw(self.model.logits(rows[:count], self.weights), view(places.temperature, f32, count),
             view(places.uniform, f64, count), self._draws, self._results, view(places.turn, i32, 1))

    def _forward(self, places: Places, items: Sequence[ScheduledRequest] = ()) -> Tensor:
        """The model on what lies at `places`."""
        view = self._inputs.view
        token_ids = view(places.token_ids, i64, places.rows)
        fill_tokens(token_ids, view(places.sources, i32, places.rows), self._draws)
        cold = items[0] if items and items[0].cold else None
        step = self._step(places, token_ids) if cold is None else self._cold_step(places, token_ids, cold)
        return self.model.forward(step, self.weights, self.kv)

    def _step(self, places: Places, token_ids: Tensor) -> ModelStep:
        view = self._inputs.view
        positions = view(places.positions, i64, places.rows)
        batches = []
        for group in range(len(self._windows)):
            most = most_items(places.requests, self._limits.max_model_len)
            work = DeviceWork(
                items=None if self._deterministic else view(places.items[group] + 16, i32, most, FIELDS),
                num_items=view(places.items[group], i32, 1),
                tiles=view(places.tiles, i32, places.num_tiles, 2) if places.num_tiles else None,
                slots=view(places.slots, i32, places.requests),
                scratch=self._scratch,
                longest=self._limits.max_model_len,
                one_order=self._deterministic,
            )
            batches.append(AttentionBatch(
                query_start=view(places.query_start, i32, places.requests + 1),
                seq_lens=view(places.seq_lens, i32, places.requests),
                block_table=self._slots.tables[group],
                positions=positions,
                rows=view(places.row_of, i32, places.rows),
                block_size=self._block_size,
                max_query=0,
                max_seq=0,
                kv_dtype=self._kv_dtype,
                work=work,
            ))
        return ModelStep(token_ids, positions, tuple(batches))

    def _cold_step(self, places: Places, token_ids: Tensor, item: ScheduledRequest) -> ModelStep:
        """Of one request, longer than the pool, whose first blocks pass through a stage."""
        (batch,) = self._step(places, token_ids).attention
        slot = self._slots.slot(item)
        cold = replace(batch, block_table=self._slots.tables[0, slot:slot + 1], max_query=item.count,
                       max_seq=item.start + item.count, cold=self._cold([item]), work=None)
        return ModelStep(token_ids, batch.positions, (cold,))

    def _sample_rows(self, places: Places) -> Tensor:
        return self._inputs.view(places.sample_rows, i64, places.most_samples)

    # The host's side

    def _prepare(self, batch: Batch) -> _Work:
        """Lay the batch out and send it."""
        self._turn = (self._turn + 1) % STEPS_KEPT
        items = batch.items
        slots, table_places, blocks = self._slots.take(items)
        counts = np.array([item.count for item in items], dtype=np.int64)
        starts = np.array([item.start for item in items], dtype=np.int64)
        sampled = [i for i, item in enumerate(items) if item.samples]
        prompt_rows = tuple(self._prompt_rows(items, _starts(counts))) if _scores_prompts(items) else ()
        decodes = len(sampled) == len(items) == counts.sum() and not prompt_rows and not items[0].cold
        drawn = slots if decodes else slots[sampled]
        plain = bool(self._slots.plain[drawn].all())
        key, shape = self._begin(counts, decodes, plain, not prompt_rows and not items[0].cold)
        few = _updates(table_places, blocks) if 0 < len(blocks) <= FEW_UPDATES else None
        if decodes and shape is not None:
            form = self._form(shape)
            self._inputs.begin()
            updates, places = form.send(items, slots, starts, self._turn, few), form.places
        else:
            self._inputs.begin()
            places = self._write(items, slots, counts, starts, sampled, shape, drawn)
            updates = None if few is None else self._inputs.put(few, i32)
            self._inputs.send()
        self._slots.draw[slots] = -1
        self._slots.draw[drawn] = np.arange(len(sampled), dtype=np.int32)
        if updates is not None:
            update_tables(self._slots.tables, self._inputs.view(updates, i32, 2 + 2 * len(blocks)), len(blocks))
        elif blocks:
            many = self._to_device(_updates(table_places, blocks))
            update_tables(self._slots.tables, many, len(blocks))
        sampling = None if plain else self._sampling([items[i] for i in sampled])
        return _Work(items, places, sampled, sampling, decodes, key, prompt_rows)

    def _begin(self, counts: npt.NDArray[np.int64], decodes: bool, plain: bool,
               recorded: bool) -> tuple[Key | None, _Shape | None]:
        """Of a step whose requests have so many rows: its graph, and what it is padded to for that."""
        graphs, rows = self._graphs if recorded else None, int(counts.sum())
        shape = None
        if graphs is not None and decodes:
            size = rows if rows <= self.weights.unpadded else graphs.size(rows)
            shape = _decode_shape(size)
        elif graphs is not None and np.count_nonzero(counts > 1) <= MANY_PROMPTS:
            padded = graphs.prompt_size(rows)
            shape = None if padded is None else self._prompt_shape(padded)
        self.weights.begin_step(rows if shape is None else shape.rows)
        epoch = None if shape is None else self.weights.epoch(shape.rows)
        if shape is None or epoch is None:
            return None, None
        return Key(shape.rows, plain and decodes, not decodes, epoch), shape

    def _prompt_shape(self, rows: int) -> _Shape:
        """Of any step of so many rows, of which no more than MANY_PROMPTS requests have several. There is a request at
        the end that has none: tiles that are not needed point there."""
        most, piece = self._limits.max_num_seqs, self._padding_rows
        pieces = -(-rows // piece)
        tiles = pieces + 2 + MANY_PROMPTS + (most if self._deterministic else 0)
        return _Shape(rows, most + pieces + 1, most, tiles, piece)

    def _form(self, shape: _Shape) -> DecodeForm:
        if shape.rows not in self._forms:
            self._forms[shape.rows] = DecodeForm(
                self._inputs, self._write_padding(shape), self._slots, self.model.config.num_kv_heads, self._windows,
                self._limits.max_model_len, self._deterministic)
        return self._forms[shape.rows]

    def _write_padding(self, shape: _Shape) -> Places:
        """A step of that shape without any request."""
        nothing = np.empty(0, dtype=np.int64)
        self._inputs.begin()
        return self._write((), nothing, nothing, nothing, [], shape, nothing)

    def _write(self, items: Sequence[ScheduledRequest], slots: npt.NDArray[np.int64], counts: npt.NDArray[np.int64],
               starts: npt.NDArray[np.int64], sampled: list[int], shape: _Shape | None,
               drawn: npt.NDArray[np.int64]) -> Places:
        """Padding is requests of their own, whose tokens are in the dummy block."""
        put, real_rows, real_slots = self._inputs.put, int(counts.sum()), slots
        if shape is not None:
            counts = np.concatenate((counts, _padding(shape, len(counts), real_rows)))
            starts = _padded(starts, len(counts))
            slots = np.pad(slots, (0, len(counts) - len(slots)), constant_values=self._slots.padding)
        query_start = _starts(counts)
        rows, size = int(query_start[-1]), len(counts)
        token_ids, sources = self._tokens(items, real_slots, rows, rows - real_rows)
        lengths = starts + counts
        most_samples = len(sampled) if shape is None else shape.samples
        samples = len(sampled) if shape is None or shape.tiles else shape.samples
        steps = np.array([items[i].step for i in sampled], dtype=np.uint64)
        tiled = counts > (0 if self._deterministic else 1)
        single = (counts == 1) & ~tiled
        several = np.nonzero(tiled)[0]
        tiles = prefill_tiles(several, counts[several])
        if shape is not None and len(tiles) < shape.tiles:
            nothing = np.array([[size - 1, 0]], dtype=np.int32)
            tiles = np.concatenate((tiles, np.repeat(nothing, shape.tiles - len(tiles), axis=0)))
        assert shape is None or shape.tiles in (0, len(tiles)), "a graph that was recorded for fewer tiles"
        return Places(
            rows=rows,
            requests=size,
            samples=samples,
            most_samples=most_samples,
            turn=put([self._turn], i32),
            token_ids=put(token_ids, i64),
            positions=put(np.arange(rows) + np.repeat(starts - query_start[:-1], counts), i64),
            uniform=put(_padded(random_numbers(self._slots.stream[drawn], steps), most_samples), f64),
            sample_rows=put(_padded(query_start[1:][sampled] - 1, most_samples), i64),
            sources=put(sources, i32),
            row_of=put(np.repeat(np.arange(size), counts), i32),
            query_start=put(query_start, i32),
            seq_lens=put(lengths, i32),
            slots=put(slots, i32),
            temperature=put(_padded(self._slots.temperature[drawn], most_samples), f32),
            tiles=put(tiles.ravel(), i32),
            num_tiles=len(tiles),
            items=tuple(self._write_items(query_start[:-1][single], slots[single], lengths[single], size, window)
                        for window in self._windows),
        )

    def _tokens(self, items: Sequence[ScheduledRequest], slots: npt.NDArray[np.int64], rows: int,
                padding: int) -> tuple[npt.NDArray[np.int64] | list[int], npt.NDArray[np.int32]]:
        """Token ids as far as the host knows them, and for each of the others its row among the last step's draws."""
        if rows == len(items) + padding and all(item.pending for item in items):
            sources = np.full(rows, -1, dtype=np.int32)
            sources[:len(items)] = self._slots.draw[slots]
            return np.zeros(rows, dtype=np.int64), sources
        token_ids: list[int] = []
        sources = np.full(rows, -1, dtype=np.int32)
        for item, slot in zip(items, slots, strict=True):
            known = item.request.token_ids
            if item.pending:  # only the last row can be
                token_ids += known[item.start:item.start + item.count - 1]
                sources[len(token_ids)] = self._slots.draw[slot]
                token_ids.append(0)
            else:
                token_ids += known[item.start:item.start + item.count]
        return token_ids + [0] * padding, sources

    def _write_items(self, rows: npt.NDArray[np.int64], slots: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64],
                     size: int, window: int | None) -> int:
        items = decode_items(rows, slots, lengths, self.model.config.num_kv_heads, window)
        room = FIELDS * most_items(size, self._limits.max_model_len)
        return self._inputs.put(np.concatenate(([len(items), 0, 0, 0], items.ravel())), i32, 4 + room)

    def _input_bytes(self, groups: int) -> int:
        tokens = max(self._limits.max_num_batched_tokens, self._limits.max_num_seqs)
        most = self._prompt_shape(self._limits.recorded_rows)
        requests, longest = most.requests, self._limits.max_model_len
        arrays = tokens * (8 + 8 + 4 + 4) + requests * (8 + 4 + 8 + 4 + 4 + 4) + 8 * (tokens + requests + most.tiles)
        items = groups * 4 * (4 + FIELDS * most_items(requests, longest))
        return arrays + items + UPDATES + 4096

    def _send_back(self, batch: Batch, work: _Work, logprobs: SampledLogprobs | None,
                   prompt: tuple[list[SampledLogprobs], ...]) -> CudaStep:
        count = len(work.sampled)
        if work.sampling is not None:  # else they are there
            self._results[self._turn, :count].copy_(self._draws[:count], non_blocking=True)
        if logprobs is not None:
            logprobs = logprobs.to_pinned()
        prompt = tuple([part.to_pinned() for part in parts] for parts in prompt)
        ended = None
        if self._device.type == "cuda":
            ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ended.record()
        return CudaStep(batch, work, self._read[self._turn], logprobs, prompt, ended, self._decode, self.weights)


def _starts(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def _decode_shape(size: int) -> _Shape:
    """Of a step with so many requests, padding included, that all decode one token."""
    return _Shape(size, size, size)


def _padding(shape: _Shape, requests: int, rows: int) -> npt.NDArray[np.int64]:
    """Rows of each request of padding; those at the end have none."""
    left = shape.rows - rows
    return np.clip(left - shape.piece * np.arange(shape.requests - requests), 0, shape.piece)


def _padded(values: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    return values if len(values) == size else np.pad(values, (0, size - len(values)))


def _updates(places: list[int], blocks: list[int]) -> npt.NDArray[np.int32]:
    """As kernels.triton.stage.update_tables reads them."""
    updates = np.empty(2 + 2 * len(blocks), dtype=np.int32)
    updates[0], updates[1] = len(blocks), 0
    updates[2::2], updates[3::2] = places, blocks
    return updates


def _scores_prompts(items: Sequence[ScheduledRequest]) -> bool:
    return any(item.request.params.prompt_logprobs is not None for item in items)
