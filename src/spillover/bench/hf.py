"""The reference backend: `transformers.generate` on static batches padded to the longest prompt, in request order.

As in `vllm bench throughput --backend hf`, a batch runs to the output length of its longest request, and only the
requested tokens are counted.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spillover.bench.target import BenchRequest, Completion, Counters, Limits
from spillover.errors import SpilloverError
from spillover.progress import counted


class TransformersTarget:
    planned_bytes: int | None = None

    def __init__(self, model_path: str, max_batch_size: int, dtype: str = "float32", device: str = "cpu",
                 limits: Limits | None = None) -> None:
        try:
            import torch
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise SpilloverError("--backend hf compares with transformers, which is not installed; "
                                 "pip install 'spillover[dev]'") from error
        self._torch = torch
        self.max_num_seqs = max_batch_size
        self.limits = limits
        self._device = device
        path = Path(model_path)
        source: dict[str, Any] = {"pretrained_model_name_or_path": model_path}
        if path.suffix == ".gguf":
            source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        # Progress bars of transformers are shown on a terminal only; in a file they would bury the results.
        quiet = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
        with warnings.catch_warnings(), quiet:
            warnings.simplefilter("ignore")
            logging.getLogger("transformers").setLevel(logging.ERROR)
            model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=getattr(torch, dtype))
        self._model: Any = model.to(device).eval()
        self._model.generation_config.eos_token_id = None  # no end-of-sequence token: every request runs to its length

    def generate(self, requests: Sequence[BenchRequest], progress: bool = False) -> list[Completion]:
        batches = [requests[start:start + self.max_num_seqs]
                   for start in range(0, len(requests), self.max_num_seqs)]
        with counted(len(batches), "static batches", progress) as show:
            for done, batch in enumerate(batches, 1):
                self._generate(batch)
                show(done, "")
        return [Completion(request.output_len, {"computed": len(request.prompt_token_ids)}) for request in requests]

    def _generate(self, batch: Sequence[BenchRequest]) -> None:
        longest = max(len(request.prompt_token_ids) for request in batch)
        rows = [[0] * (longest - len(request.prompt_token_ids)) + list(request.prompt_token_ids) for request in batch]
        mask = [[0] * (longest - len(request.prompt_token_ids)) + [1] * len(request.prompt_token_ids)
                for request in batch]
        steps = max(request.output_len for request in batch)
        with self._torch.inference_mode():
            self._model.generate(
                input_ids=self._torch.tensor(rows, device=self._device),  # [B, longest], padded on the left
                attention_mask=self._torch.tensor(mask, device=self._device),
                do_sample=False, max_new_tokens=steps, min_new_tokens=steps, use_cache=True, pad_token_id=0)

    def counters(self) -> Counters:
        return Counters()

    def reset_prefix_cache(self) -> None:
        """Do nothing: no KV outlives a batch here."""

    def close(self) -> None:
        del self._model
