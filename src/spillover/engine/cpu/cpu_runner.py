"""Runs steps on the CPU: lays out the tensors, calls the model, samples the tokens. Knows no queue and no policy.

`launch` returns before the step has ended, so that the next one can be prepared; steps run in the order of launch, on a
thread of their own that stands in for a device's stream. A token that the step before sampled is read there, without
waiting for the host to know it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from spillover.engine.batch.offloaded_prefix import OffloadStage
from spillover.engine.batch.request_table import StepLimits
from spillover.engine.batch.sampler import Sampled, SampledLogprobs, SamplingBatch, sample
from spillover.engine.batch.step_layout import ItemArrays, SampleRows, StepArrays, write_step
from spillover.engine.batch.step_result import PromptRows, prompt_rows, sampling_batch, score, to_result
from spillover.engine.step import Step, StepResult
from spillover.engine.weights.placed import EngineWeights, FixedWeights
from spillover.engine.weights.traffic import WeightTraffic
from spillover.kernels.batch import AttentionBatch
from spillover.memory.transfer.transfers import Transfers
from spillover.models.layers import Decoder, KVViews, ModelStep

Changed = TypeVar("Changed")


@dataclass(frozen=True)
class _Work:
    """A step as tensors."""

    step: ModelStep
    pending_rows: Tensor  # rows whose token the step before sampled ...
    pending_draws: Tensor  # ... and which of its draws that was
    sample_rows: Tensor  # [R]
    sampling: SamplingBatch | None  # None: nothing is sampled
    prompt_rows: tuple[PromptRows, ...]


@dataclass(frozen=True)
class _Outcome:
    sampled: Sampled | None
    prompt: tuple[list[SampledLogprobs], ...]  # parallel to the work's prompt_rows


class LaunchedStep:
    """A step on its way; `result` waits for it."""

    def __init__(self, step: Step, outcome: Future[_Outcome], prompts: tuple[PromptRows, ...],
                 runner: CpuRunner) -> None:
        self.step = step
        self._outcome = outcome
        self._prompts = prompts
        self._runner = runner

    def wait(self) -> None:
        self._outcome.result()

    def result(self) -> StepResult:
        outcome = self._outcome.result()
        drawn: list[int] = outcome.sampled.token_ids.tolist() if outcome.sampled is not None else []
        logprobs = outcome.sampled.logprobs if outcome.sampled is not None else None
        return to_result(self.step, self._runner.table, drawn, logprobs, self._prompts, outcome.prompt,
                         self._runner.decode)


class CpuRunner:
    def __init__(self, model: Decoder, weights: EngineWeights, kv: KVViews, block_size: int, limits: StepLimits,
                 transfers: Transfers, decode: Callable[[int], str] | None = None, kv_dtype: str = "auto",
                 stage: OffloadStage | None = None) -> None:
        """`stage`: what the cold blocks of sequences longer than the pool pass through."""
        self.model = model
        self.weights = weights
        self.kv = kv
        self.decode = decode
        self.transfers = transfers
        self.table = limits.request_table(len(model.groups), block_size, torch.device("cpu"))
        self._block_size = block_size
        self._kv_dtype = kv_dtype
        self._stage = stage
        self._stack = model.stack(weights, kv) if isinstance(weights, FixedWeights) else None
        self._drawn: Tensor | None = None  # [R], the last executed step's draws
        self._stream = ThreadPoolExecutor(1, "spillover-step")

    def launch(self, step: Step) -> LaunchedStep:
        work = self.lay_out(step)
        return LaunchedStep(step, self._stream.submit(self._execute, work), work.prompt_rows, self)

    def in_order(self, change: Callable[[], Changed]) -> Changed:
        """Make a change to the device's memory after all steps that were launched, and before those to come."""
        return self._stream.submit(change).result()

    def sleep(self, blocks: Sequence[int]) -> None:
        """Do nothing: the device is the host already."""

    def wake_up(self) -> None:
        pass

    @property
    def weight_bytes(self) -> int:
        return self.weights.nbytes

    def weight_traffic(self) -> WeightTraffic:
        return self.weights.traffic()

    def close(self) -> None:
        self._stream.shutdown()
        self.weights.close()
        self.transfers.close()

    def lay_out(self, step: Step) -> _Work:
        slots, updates = self.table.begin(step)
        for request in step.new:  # entries of the request that had the slot before
            self.table.block_tables[:, self.table[request.id].slot] = 0
        self.table.block_tables.view(-1).numpy()[updates.places] = updates.blocks
        items = ItemArrays.of(step.items, slots)
        arrays = StepArrays.empty(items.num_rows, len(slots), items.num_samples)
        sampled = write_step(arrays, items, self.table)
        pending = (arrays.sources >= 0).nonzero()[0]
        self._remember(items, sampled)
        tensor = torch.from_numpy
        positions, lengths = tensor(arrays.positions), arrays.seq_lens
        longest = int(lengths.max())
        width = -(-longest // self._block_size)
        cold = self._stage.prefix(step.items[0]) if step.items[0].host_blocks and self._stage else None
        attention = tuple(
            AttentionBatch(
                query_start=tensor(arrays.query_start),
                seq_lens=tensor(lengths),
                block_table=block_table[:, :width][tensor(slots)],
                positions=positions,
                rows=tensor(arrays.row_of),
                block_size=self._block_size,
                max_query=int(items.counts.max()),
                max_seq=longest,
                kv_dtype=self._kv_dtype,
                cold=cold,
            )
            for block_table in self.table.block_tables
        )
        return _Work(
            step=ModelStep(tensor(arrays.token_ids), positions, attention),
            pending_rows=tensor(pending),
            pending_draws=tensor(arrays.sources[pending]).long(),
            sample_rows=tensor(arrays.sample_rows),
            sampling=sampling_batch(step.items, self.table, self.model.config.vocab_size, torch.device("cpu"))
            if len(sampled.rows) else None,
            prompt_rows=prompt_rows(step, self.table, torch.device("cpu")),
        )

    def _remember(self, items: ItemArrays, sampled: SampleRows) -> None:
        """Note where the requests' next tokens will be among this step's draws."""
        self.table.draw[items.slots] = -1
        self.table.draw[sampled.slots] = range(len(sampled.slots))

    @torch.inference_mode()
    def _execute(self, work: _Work) -> _Outcome:
        if len(work.pending_rows):
            assert self._drawn is not None
            work.step.token_ids[work.pending_rows] = self._drawn[work.pending_draws]
        hidden = self.model.forward_stacked(work.step, self.weights, self.kv, self._stack)  # [T, H]
        sampled = None
        if work.sampling is not None:
            logits = self.model.logits(hidden[work.sample_rows], self.weights)  # [R, V]
            with record_function("spill::sampling"):
                sampled = sample(logits, work.sampling)
            self._drawn = sampled.token_ids
        prompt = tuple(score(self.model, self.weights, hidden, rows) for rows in work.prompt_rows)
        return _Outcome(sampled, prompt)
