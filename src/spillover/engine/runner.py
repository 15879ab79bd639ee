"""Runs one batch on the device: lays out the tensors, calls the model, draws the tokens. Knows no queue and no policy.

`launch` returns before the step has ended, so the host can prepare the next one; steps run in the order of launch. A
token that the step before drew is read on the device, without waiting for the host to know it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.profiler import record_function

from spillover.engine.batch import Batch, ScheduledRequest, StepResult
from spillover.engine.cold_prefix import ColdStage, StagedPrefix
from spillover.engine.sampler import (
    RowState,
    Sampled,
    SampledLogprobs,
    SamplingBatch,
    build_sampling_batch,
    prompt_logprobs,
    sample,
    to_position_logprobs,
)
from spillover.engine.weights.placed import PlacedWeights
from spillover.engine.weights.traffic import WeightTraffic
from spillover.kernels.batch import AttentionBatch
from spillover.models.layers import Decoder, KVViews, ModelStep
from spillover.models.weights import ResidentWeights, Weights

Changed = TypeVar("Changed")
PROMPT_LOGITS_ROWS = 64  # prompt logits are made this many rows at a time: a row is a whole vocabulary


@dataclass(frozen=True)
class PromptRows:
    """Rows of a step whose next tokens, known from the prompt, are to be scored."""

    item: int  # index into the batch's items
    first_row: int
    next_token_ids: list[int]  # the token that each row should have predicted
    next_ids: Tensor  # the same on the device, [P]
    alternatives: int


@dataclass(frozen=True)
class _Work:
    """A batch as tensors on the device."""

    step: ModelStep
    pending_rows: Tensor | None  # rows whose token the step before drew ...
    pending_draws: Tensor | None  # ... and which of its draws that was
    sample_rows: Tensor | None  # [R]
    sampling: SamplingBatch | None
    prompt_rows: tuple[PromptRows, ...]


@dataclass(frozen=True)
class _Outcome:
    sampled: Sampled | None
    prompt: tuple[list[SampledLogprobs], ...]  # parallel to the work's prompt_rows


class Step:
    """A launched batch; `result` waits for it."""

    def __init__(self, batch: Batch, outcome: Future[_Outcome], decode: Callable[[int], str] | None,
                 work: _Work) -> None:
        self.batch = batch
        self._outcome = outcome
        self._decode = decode
        self._prompt_rows = work.prompt_rows

    def result(self) -> StepResult:
        outcome, items = self._outcome.result(), self.batch.items
        sampled = [i for i, item in enumerate(items) if item.samples]
        drawn: list[int] = outcome.sampled.token_ids.tolist() if outcome.sampled is not None else []
        logprobs = outcome.sampled.logprobs if outcome.sampled is not None else None
        return to_result(items, sampled, drawn, logprobs, self._prompt_rows, outcome.prompt, self._decode)


class Runner:
    def __init__(self, model: Decoder, weights: ResidentWeights, kv: KVViews, block_size: int, device: torch.device,
                 decode: Callable[[int], str] | None = None, kv_dtype: str = "auto",
                 stage: ColdStage | None = None) -> None:
        """`stage`: what the cold blocks of sequences longer than the pool pass through."""
        self.model = model
        self.weights = weights
        self.kv = kv
        self._block_size = block_size
        self._device = device
        self._decode = decode
        self._kv_dtype = kv_dtype
        self._stage = stage
        self._draw_of: dict[str, int] = {}  # request -> its row among the last launched step's draws
        self._drawn: Tensor | None = None  # [R], the last executed step's draws, on the device
        # A CUDA launch returns at once by itself; on the CPU a thread of its own stands in for the stream.
        self._stream = ThreadPoolExecutor(1, "spillover-step")

    def launch(self, batch: Batch) -> Step:
        work = self._lay_out(batch)
        return Step(batch, self._stream.submit(self._execute, work), self._decode, work)

    def in_order(self, change: Callable[[], Changed]) -> Changed:
        """Makes a change to the device's memory after all steps that were launched, and before those to come."""
        return self._stream.submit(change).result()

    def sleep(self, blocks: Sequence[int]) -> None:
        """Weights and the KV of these blocks to the host, where the device is not the host already. No step may run."""
        if self._device.type != "cpu":
            self.kv.sleep(blocks)  # first: slots of experts may lie in the same memory
            self.weights.move(torch.device("cpu"))
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        if self._device.type != "cpu":
            self.weights.move(self._device)
            self.kv.wake_up()

    @property
    def weight_bytes(self) -> int:
        return self.weights.nbytes

    def weight_traffic(self) -> WeightTraffic:
        """Nothing where all weights are resident."""
        return self.weights.traffic() if isinstance(self.weights, PlacedWeights) else WeightTraffic()

    def close(self) -> None:
        self._stream.shutdown()
        self.weights.close()
        if self._stage is not None:
            self._stage.close()

    def _lay_out(self, batch: Batch) -> _Work:
        items = batch.items
        counts = np.array([item.count for item in items], dtype=np.int64)
        starts = np.array([item.start for item in items], dtype=np.int64)
        query_start = np.zeros(len(items) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        rows = np.repeat(np.arange(len(items), dtype=np.int32), counts)
        positions = np.arange(query_start[-1], dtype=np.int64) + np.repeat(starts - query_start[:-1], counts)
        token_ids: list[int] = []
        pending_rows, pending_draws = [], []
        for item in items:
            known = item.request.token_ids
            if item.pending:  # only the last row can be pending; 0 stands in until the device fills it
                token_ids += known[item.start:item.start + item.count - 1]
                pending_rows.append(len(token_ids))
                pending_draws.append(self._draw_of[item.request.request_id])
                token_ids.append(0)
            else:
                token_ids += known[item.start:item.start + item.count]
        seq_lens = starts + counts
        shared: dict[str, Any] = {
            "query_start": self._to_device(query_start),
            "seq_lens": self._to_device(seq_lens.astype(np.int32)),
            "positions": self._to_device(positions),
            "rows": self._to_device(rows),
        }
        attention = tuple(
            AttentionBatch(
                **shared,
                block_table=self._to_device(self._block_table(items, group)),
                block_size=self._block_size,
                max_query=int(counts.max()),
                max_seq=int(seq_lens.max()),
                kv_dtype=self._kv_dtype,
                cold=self._cold(items),
            )
            for group in range(len(items[0].tables))
        )
        sampled = [i for i, item in enumerate(items) if item.samples]
        self._draw_of = {items[i].request.request_id: row for row, i in enumerate(sampled)}
        return _Work(
            step=ModelStep(self._to_device(np.array(token_ids, dtype=np.int64)), shared["positions"], attention),
            pending_rows=self._to_device(np.array(pending_rows, dtype=np.int64)) if pending_rows else None,
            pending_draws=self._to_device(np.array(pending_draws, dtype=np.int64)) if pending_rows else None,
            sample_rows=self._to_device(query_start[1:][sampled].astype(np.int64) - 1) if sampled else None,
            sampling=self._sampling([items[i] for i in sampled]) if sampled else None,
            prompt_rows=tuple(self._prompt_rows(items, query_start)),
        )

    def _cold(self, items: Sequence[ScheduledRequest]) -> StagedPrefix | None:
        if not items[0].cold:
            return None
        assert self._stage is not None, "the plan has no sequences longer than the pool"
        return self._stage.prefix(items[0])

    def _block_table(self, items: Sequence[ScheduledRequest], group: int) -> npt.NDArray[np.int32]:
        lengths = [-(-(item.start + item.count) // self._block_size) for item in items]
        table = np.zeros((len(items), max(lengths)), dtype=np.int32)
        for row, (item, length) in enumerate(zip(items, lengths, strict=True)):
            table[row, :length] = item.tables[group][:length]
        return table

    def _sampling(self, items: Sequence[ScheduledRequest]) -> SamplingBatch:
        vocab = self.model.config.vocab_size
        states = []
        for item in items:
            request = item.request
            mask = None
            if request.grammar is not None:
                mask = torch.zeros((vocab + 31) // 32, dtype=torch.int32)
                request.grammar.fill_mask(mask)
            states.append(RowState(
                params=request.params,
                seed=request.seed,
                step=item.step,
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=request.output_token_ids if request.lockstep else (),
                mask=mask,
                stop_ids=tuple(request.stop_ids),
            ))
        return build_sampling_batch(states, vocab, self._device)

    def _prompt_rows(self, items: Sequence[ScheduledRequest],
                     query_start: npt.NDArray[np.signedinteger[Any]]) -> list[PromptRows]:
        found = []
        for index, item in enumerate(items):
            request = item.request
            wanted = request.params.prompt_logprobs
            if wanted is None or len(request.prompt_logprobs) >= request.num_prompt - 1:
                continue
            next_ids = request.prompt_token_ids[item.start + 1:item.start + item.count + 1]
            if next_ids:
                ids = self._to_device(np.array(next_ids, dtype=np.int64))
                found.append(PromptRows(index, int(query_start[index]), next_ids, ids, wanted))
        return found

    def _to_device(self, array: npt.NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    @torch.inference_mode()
    def _execute(self, work: _Work) -> _Outcome:
        if work.pending_rows is not None:
            assert self._drawn is not None
            work.step.token_ids[work.pending_rows] = self._drawn[work.pending_draws]
        hidden = self.model.forward(work.step, self.weights, self.kv)  # [T, H]
        sampled = None
        if work.sample_rows is not None and work.sampling is not None:
            logits = self.model.logits(hidden[work.sample_rows], self.weights)  # [R, V]
            with record_function("spill::sampling"):
                sampled = sample(logits, work.sampling)
            self._drawn = sampled.token_ids
        prompt = tuple(score(self.model, self.weights, hidden, rows) for rows in work.prompt_rows)
        return _Outcome(sampled, prompt)


def score(model: Decoder, weights: Weights, hidden: Tensor, rows: PromptRows) -> list[SampledLogprobs]:
    """Log probabilities of a prompt's tokens, a few rows of logits at a time."""
    parts = []
    for start in range(0, len(rows.next_ids), PROMPT_LOGITS_ROWS):
        ids = rows.next_ids[start:start + PROMPT_LOGITS_ROWS]
        first = rows.first_row + start
        logits = model.logits(hidden[first:first + len(ids)], weights)
        parts.append(prompt_logprobs(logits, ids, rows.alternatives))
    return parts


def to_result(items: Sequence[ScheduledRequest], sampled: Sequence[int], drawn: Sequence[int],
              logprobs: SampledLogprobs | None, prompt_rows: Sequence[PromptRows],
              prompt: Sequence[Sequence[SampledLogprobs]], decode: Callable[[int], str] | None) -> StepResult:
    """What a step drew, in the order of its items; `sampled` are the items that `drawn` and `logprobs` are of."""
    result = StepResult([None] * len(items), [None] * len(items), [None] * len(items))
    table = logprobs.host_rows() if logprobs is not None else None
    for row, index in enumerate(sampled):
        result.token_ids[index] = drawn[row]
        wanted = items[index].request.params.logprobs
        if wanted is not None and table is not None:
            result.logprobs[index] = to_position_logprobs(table[row], drawn[row], wanted, decode)
    for rows, parts in zip(prompt_rows, prompt, strict=True):
        scored = [row for part in parts for row in part.host_rows()]
        result.prompt_logprobs[rows.item] = [
            to_position_logprobs(row, token, rows.alternatives, decode)
            for row, token in zip(scored, rows.next_token_ids, strict=True)
        ]
    return result
