"""Trains an EAGLE-3 head on a model's own answers, with the model loaded to provide its hidden states.

The model computes the sequences again in every step, as stored hidden states of all answers would take gigabytes.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spillover.models.config import ModelConfig
from spillover.training.answers import Answers
from spillover.training.head_student import HeadStudent, head_config
from spillover.training.teacher import Teacher
from spillover.training.train import ENGINE_SHARE, Training, TrainOptions

PASSES = 3  # passes trained in each step
FADING = 0.8  # weight of a pass's loss, relative to the previous pass


class HeadTraining(Training):
    def __init__(self, model: str, path: Path, folder: Path, options: TrainOptions, answers: Answers,
                 resume: bool) -> None:
        super().__init__(path, folder, options, answers, resume)
        self.model_tokens = torch.from_numpy(answers.tokens.astype(np.int64)).to(self.device)
        budget = ENGINE_SHARE if options.device == "cuda" else None
        assert isinstance(self.student, HeadStudent)
        self.head = self.student
        self.teacher = Teacher(model, self.head.taps, int(self.lengths.max()), options.device, budget)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.teacher.close()

    def _student(self, target: ModelConfig, hf: dict[str, Any]) -> HeadStudent:
        known = target.vocab_size if self.full_vocab else len(self.target_ids)
        return HeadStudent(target, head_config(target, hf, known), int(self.lengths.max()), self.device)

    def _loss(self, some: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[Tensor, Tensor]:
        """Return the loss over all passes, and the top-1 agreement of the first pass with the model."""
        batch = self._batch(some)
        ids = self.model_tokens[batch.token_index]  # [B, width]
        features = pad_sequence([self.teacher.features(self.model_tokens[start:start + length].tolist())
                                 for start, length in zip(self.starts[some], self.lengths[some], strict=True)],
                                batch_first=True)
        probs, likely = self.top_probs[batch.scores], self.top_ids[batch.scores]  # [N, TOP]
        best = likely.gather(-1, probs.argmax(-1, keepdim=True))[:, 0]
        probs = probs * (likely < self.unknown_id)  # restricted to tokens in the head's vocabulary
        known = probs.sum(-1, keepdim=True)
        probs, likely = probs / known.clamp_min(1e-9), likely.clamp_max(self.head.hf["draft_vocab_size"] - 1)
        constant = (probs * probs.clamp_min(1e-9).log()).sum(-1)
        total, agreed = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            passes = self.head(ids, features.to(self.device), PASSES)
        for index, hidden in enumerate(passes):
            counted = batch.positions - 1 >= index
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                logits = self.head.logits(hidden[batch.rows, batch.positions - 1])
            logprobs = logits.float().log_softmax(-1)
            soft = constant - (probs * logprobs.gather(-1, likely)).sum(-1)
            total = total + FADING**index * soft[counted & (known[:, 0] > 0)].mean()
            if index == 0:
                agreed = ((logprobs.argmax(-1) == best) & (best < self.unknown_id)).float().mean()
        return total, agreed
