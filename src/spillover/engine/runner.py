"""Runs one batch on the device: lays out the tensors, calls the model, draws the tokens. Knows no queue and no policy.

`launch` returns before the step has ended, so the host can prepare the next one; steps run in the order of launch. A
token that the step before drew is read on the device, without waiting for the host to know it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spillover.engine.batch import Batch, ScheduledRequest, StepResult
from spillover.engine.outputs import PositionLogprobs
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
from spillover.kernels.attention import AttentionBatch
from spillover.models.layers import Decoder, KVViews, ModelStep
from spillover.models.weights import ResidentWeights

PROMPT_LOGITS_ROWS = 64  # prompt logits are made this many rows at a time: a row is a whole vocabulary


@dataclass(frozen=True)
class _PromptRows:
    item: int  # index into the batch's items
    first_row: int
    next_ids: Tensor  # [P], the token that each row should have predicted
    alternatives: int


@dataclass(frozen=True)
class _Work:
    """A batch as tensors on the device."""

    step: ModelStep
    pending_rows: Tensor | None  # rows whose token the step before drew ...
    pending_draws: Tensor | None  # ... and which of its draws that was
    sample_rows: Tensor | None  # [R]
    sampling: SamplingBatch | None
    prompt_rows: tuple[_PromptRows, ...]


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
        outcome = self._outcome.result()
        items = self.batch.items
        tokens: list[int | None] = [None] * len(items)
        logprobs: list[PositionLogprobs | None] = [None] * len(items)
        prompt: list[list[PositionLogprobs] | None] = [None] * len(items)
        if outcome.sampled is not None:
            drawn: list[int] = outcome.sampled.token_ids.tolist()
            table = outcome.sampled.logprobs.host_rows() if outcome.sampled.logprobs is not None else None
            for row, index in enumerate(i for i, item in enumerate(items) if item.samples):
                tokens[index] = drawn[row]
                wanted = items[index].request.params.logprobs
                if wanted is not None and table is not None:
                    logprobs[index] = to_position_logprobs(table[row], drawn[row], wanted, self._decode)
        for rows, parts in zip(self._prompt_rows, outcome.prompt, strict=True):
            scored = [row for part in parts for row in part.host_rows()]
            prompt[rows.item] = [
                to_position_logprobs(row, token, rows.alternatives, self._decode)
                for row, token in zip(scored, rows.next_ids.tolist(), strict=True)
            ]
        return StepResult(tokens, logprobs, prompt)


class Runner:
    def __init__(self, model: Decoder, weights: ResidentWeights, kv: KVViews, block_size: int, device: torch.device,
                 decode: Callable[[int], str] | None = None) -> None:
        self.model = model
        self.weights = weights
        self.kv = kv
        self._block_size = block_size
        self._device = device
        self._decode = decode
        self._draw_of: dict[str, int] = {}  # request -> its row among the last launched step's draws
        self._drawn: Tensor | None = None  # [R], the last executed step's draws, on the device
        # A CUDA launch returns at once by itself; on the CPU a thread of its own stands in for the stream.
        self._stream = ThreadPoolExecutor(1, "spillover-step") if device.type == "cpu" else None

    def launch(self, batch: Batch) -> Step:
        work = self._lay_out(batch)
        if self._stream is not None:
            outcome = self._stream.submit(self._execute, work)
        else:
            outcome = Future()
            outcome.set_result(self._execute(work))
        return Step(batch, outcome, self._decode, work)

    def sleep(self) -> None:
        """Weights to the host, where the device is not the host already. No step may run."""
        if self._device.type != "cpu":
            self.weights.move(torch.device("cpu"))
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        if self._device.type != "cpu":
            self.weights.move(self._device)

    @property
    def weight_bytes(self) -> int:
        return self.weights.nbytes

    def close(self) -> None:
        if self._stream is not None:
            self._stream.shutdown()

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
        shared = {
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

    def _prompt_rows(self, items: Sequence[ScheduledRequest], query_start: npt.NDArray[np.int32]) -> list[_PromptRows]:
        found = []
        for index, item in enumerate(items):
            request = item.request
            wanted = request.params.prompt_logprobs
            if wanted is None or len(request.prompt_logprobs) >= request.num_prompt - 1:
                continue
            next_ids = request.prompt_token_ids[item.start + 1:item.start + item.count + 1]
            if next_ids:
                ids = self._to_device(np.array(next_ids, dtype=np.int64))
                found.append(_PromptRows(index, int(query_start[index]), ids, wanted))
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
            sampled = sample(logits, work.sampling)
            self._drawn = sampled.token_ids
        return _Outcome(sampled, tuple(self._score(hidden, rows) for rows in work.prompt_rows))

    def _score(self, hidden: Tensor, rows: _PromptRows) -> list[SampledLogprobs]:
        parts = []
        for start in range(0, len(rows.next_ids), PROMPT_LOGITS_ROWS):
            ids = rows.next_ids[start:start + PROMPT_LOGITS_ROWS]
            first = rows.first_row + start
            logits = self.model.logits(hidden[first:first + len(ids)], self.weights)
            parts.append(prompt_logprobs(logits, ids, rows.alternatives))
        return parts
