"""The model that a head is trained for: returns its hidden states of any sequence, as computed by the engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spillover.engine.batch.draft_head import feature_taps
from spillover.engine.cpu.cpu_runner import CpuRunner
from spillover.engine.llm import LLM
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.errors import SpilloverError
from spillover.kernels.batch import AttentionBatch
from spillover.models.layers import Decoder, Tap

_ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


class Teacher:
    """A model that runs one sequence at a time, each in one eager step."""

    def __init__(self, model: str, layers: Sequence[int], longest: int, device: str, gpu_memory: str | None) -> None:
        """Load a model. `layers`: the layers whose inputs are returned; `longest`: maximum tokens of a sequence."""
        self._llm = LLM(model, device=device, gpu_memory=gpu_memory, max_model_len=longest + 1, max_num_seqs=1,
                        max_num_batched_tokens=longest + 1, enable_prefix_caching=False, enforce_eager=True,
                        skip_tokenizer_init=True, generation_config="none")
        runner = self._llm.engine.runner
        if not isinstance(runner, CpuRunner):
            from spillover.engine.cuda.cuda_runner import CudaRunner  # needs Triton

            if not isinstance(runner, CudaRunner):
                raise SpilloverError("a head can only be trained for a model that has weights")
        self._reader = _Reader(runner.model, tuple(layers), runner.kv.pool.device)
        runner.feature_reader = self._reader

    def features(self, tokens: Sequence[int]) -> Tensor:
        """Return hidden states [tokens, layers * hidden] in float32."""
        self._reader.seen.clear()
        self._llm.generate([{"prompt_token_ids": list(tokens)}], _ONE, use_tqdm=False)
        return torch.cat(self._reader.seen)[:len(tokens)].float().clone()

    def close(self) -> None:
        self._llm.close()


class _Reader:
    def __init__(self, model: Decoder, layers: tuple[int, ...], device: torch.device) -> None:
        self.seen: list[Tensor] = []
        self._model, self._layers, self._device = model, layers, device

    def taps(self, rows: int) -> tuple[Tensor, list[Tap]]:
        return feature_taps(self._layers, rows, self._model, self._device)

    def observe(self, token_ids: Tensor, features: Tensor, batch: AttentionBatch, slots: Tensor,
                follows: Tensor) -> None:
        self.seen.append(features)
