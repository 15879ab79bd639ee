"""Trains a draft model on a model's own answers, to give the model's most likely tokens the same probabilities.

The state is stored in DIR/training: the answers, the loss by step, and checkpoints of the weights with the optimizer's
state, from which `resume` continues.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spillover.engine.llm import LLM
from spillover.errors import SpilloverError
from spillover.models.checkpoint import open_checkpoint, read_config
from spillover.models.config import ModelConfig
from spillover.models.hub.store import resolve
from spillover.models.registry import read_architecture
from spillover.progress import ANSWERING, ASKING, TRAINING
from spillover.training.answers import Answers, answer, generate_prompts, read_prompts, write_settings
from spillover.training.student import Student, student_config

if TYPE_CHECKING:
    from spillover.training.head_student import HeadStudent

WARMUP = 0.05  # share of the steps in which the learning rate rises
LEAST_RATE = 0.05  # final learning rate as a share of the maximum
DECAY = 0.01  # weight decay
CLIP = 1.0  # maximum norm of gradients
SCORED = 64  # maximum number of sequences held out for evaluation; at most a tenth of all
CHECKPOINTS = 10  # number of checkpoints per training run
ENGINE_SHARE = "50%"  # share of a GPU's memory for the engine; the rest is for training

Show = Callable[[str, int, int], None]


@dataclass(frozen=True)
class TrainOptions:
    method: str = "draft_model"  # or "eagle3": a head that reads the model's hidden states
    layers: int = 2
    draft_vocab: int = 8192  # 0: all of the model's tokens
    steps: int = 2000
    batch_tokens: int = 8192
    learning_rate: float = 1e-3
    answers: int = 4000
    prompt_tokens: int = 256  # maximum tokens of a prompt
    answer_tokens: int = 256  # maximum tokens of an answer
    seed: int = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("layers", "steps", "batch_tokens", "answers", "prompt_tokens", "answer_tokens"):
            if getattr(self, name) < 1:
                raise SpilloverError(f"--{name.replace('_', '-')} must be at least 1; got {getattr(self, name)}")
        if self.draft_vocab < 0 or not self.learning_rate > 0:
            raise SpilloverError("--draft-vocab is 0 or more, and --learning-rate above 0")
        if self.method == "eagle3" and self.layers != type(self).layers:
            raise SpilloverError("an EAGLE-3 head has one layer: leave --layers out")


@dataclass(frozen=True)
class Trained:
    """The result of a training run; losses in nats per token."""

    folder: Path
    first_loss: float
    last_loss: float
    agreement: float  # share of the held-out answers' positions with the same most likely token as the model
    covered: float  # share of the answers' tokens that are in the draft vocabulary
    nbytes: int


def train(model: str, folder: Path, options: TrainOptions, data: Path | None = None, resume: bool = False,
          show: Show = lambda what, done, total: None) -> Trained:
    """Train a draft model for `model` and write it to `folder`."""
    state = folder / "training"
    if folder.is_dir() and any(folder.iterdir()) and not resume:
        raise SpilloverError(f"{folder} is not empty; name another folder, or give --resume to continue the training "
                             "in it")
    path = resolve(model)
    if options.device == "auto":
        options = replace(options, device="cuda" if torch.cuda.is_available() else "cpu")
    _check_settings(state / "settings.json", path, options, resume)
    file = state / "answers.npz"
    if not (resume and file.is_file()):
        _answers(model, path, options, data, show).save(file)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()  # returns the engine's memory to the device
    if options.method == "eagle3":
        from spillover.training.train_head import HeadTraining

        with HeadTraining(model, path, folder, options, Answers.load(file), resume) as head:
            return head.run(show)
    return Training(path, folder, options, Answers.load(file), resume).run(show)


def _check_settings(file: Path, path: Path, options: TrainOptions, resume: bool) -> None:
    settings = {"model": path.name, **{name: value for name, value in asdict(options).items()
                                       if name not in ("steps", "device")}}
    if resume and file.is_file():
        before = {"method": "draft_model", **json.loads(file.read_text())}
        changed = [name for name, value in settings.items() if before.get(name) != value]
        if changed:
            raise SpilloverError(f"{file.parent.parent} was started with another {', '.join(changed)}; give the same "
                                 "options, or another folder")
    write_settings(file, settings)


def _answers(model: str, path: Path, options: TrainOptions, data: Path | None, show: Show) -> Answers:
    _, config = read_architecture(read_config(path), path)
    length = min(options.prompt_tokens + options.answer_tokens + 1, config.max_position)
    budget = ENGINE_SHARE if options.device == "cuda" else None
    with LLM(model, device=options.device, gpu_memory=budget, max_model_len=length, seed=options.seed,
             generation_config="none", progress=lambda done, total, what: show(what, done, total)) as llm:
        longest = max(1, length - 1 - min(options.answer_tokens, length // 2))
        if data is not None:
            prompts = read_prompts(data, llm, longest)
        else:
            prompts = generate_prompts(llm, -(-options.answers // 2), longest, options.seed,
                                       lambda done, total: show(ASKING, done, total))
        tokens = min(options.answer_tokens, length - 1 - max(map(len, prompts)))
        return answer(llm, prompts, options.answers, tokens, options.seed,
                      lambda done, total: show(ANSWERING, done, total))


@dataclass(frozen=True)
class Batch:
    """The sequences of a step as indices, and the positions of their N answer tokens."""

    token_index: Tensor  # [B, width]: index of each token among the tokens of all sequences
    rows: Tensor  # [N]: sequence in the batch of each answer token
    positions: Tensor  # [N]: position in its sequence of each answer token
    scores: Tensor  # [N]: index of each answer token's most likely tokens


class Training:
    """A training run of a draft model."""

    def __init__(self, path: Path, folder: Path, options: TrainOptions, answers: Answers, resume: bool) -> None:
        self.folder, self.options = folder, options
        self.device = torch.device(options.device)
        hf = read_config(path)
        _, target = read_architecture(hf, path)
        full_vocab = not 0 < options.draft_vocab < target.vocab_size - 1
        counts = np.bincount(answers.tokens, minlength=target.vocab_size) * (1 << 20)
        counts += np.bincount(answers.top_ids.ravel(), minlength=target.vocab_size)
        kept = np.arange(target.vocab_size) if full_vocab else np.sort(np.argsort(-counts, kind="stable")[
            :options.draft_vocab])
        self.target_ids = torch.from_numpy(kept)
        self.full_vocab = full_vocab
        draft_ids = np.full(target.vocab_size, len(kept), dtype=np.int64)
        draft_ids[kept] = np.arange(len(kept))
        answer_tokens = np.concatenate([part[prompt:] for part, prompt in zip(
            np.split(answers.tokens, np.cumsum(answers.lengths)[:-1]), answers.prompts, strict=True)])
        self.covered = float((draft_ids[answer_tokens] < len(kept)).mean()) if not full_vocab else 1.0
        self.lengths, self.prompts = answers.lengths.astype(np.int64), answers.prompts.astype(np.int64)
        self.starts = np.concatenate(([0], np.cumsum(self.lengths)[:-1]))
        self.scores = np.concatenate(([0], np.cumsum(self.lengths - self.prompts)[:-1]))
        self.tokens = torch.from_numpy(draft_ids[answers.tokens]).to(self.device)
        self.top_ids = torch.from_numpy(draft_ids[answers.top_ids]).to(self.device)
        self.top_probs = torch.from_numpy(answers.top_logprobs.astype(np.float32)).exp().to(self.device)
        self.unknown_id = len(kept)
        rng = np.random.default_rng(options.seed)
        order = rng.permutation(len(self.lengths))
        num_held_out = min(SCORED, len(order) // 10)
        self.held_out, self.train_set = order[:num_held_out] if num_held_out else order, order[num_held_out:]
        self.student = self._student(target, hf)
        with open_checkpoint(path) as checkpoint:
            self.student.init_from(checkpoint, target.num_layers, self.target_ids)
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=options.learning_rate, betas=(0.9, 0.95),
                                           weight_decay=DECAY)
        self.step, self.first_loss = 0, math.nan
        self.file = folder / "training" / "checkpoint.pt"
        if resume and self.file.is_file():
            self._load()

    def _student(self, target: ModelConfig, hf: dict[str, Any]) -> Student | HeadStudent:
        """Make the module to train; unless it knows all tokens, one additional id stands for unknown ones."""
        vocab = target.vocab_size if self.full_vocab else len(self.target_ids) + 1
        return Student(student_config(target, hf, self.options.layers, vocab), int(self.lengths.max()), self.device)

    def run(self, show: Show) -> Trained:
        options = self.options
        every = max(1, options.steps // CHECKPOINTS)
        while self.step < options.steps:
            for group in self.optimizer.param_groups:
                group["lr"] = options.learning_rate * _rate(self.step / options.steps)
            # A step's sequences depend on its number only, so that a resumed run continues as if uninterrupted.
            rng = np.random.default_rng((options.seed, self.step))
            count = max(1, options.batch_tokens // int(self.lengths.max()))
            some = rng.choice(self.train_set, min(count, len(self.train_set)), replace=False)
            found = self._loss(some)[0]
            self.optimizer.zero_grad(set_to_none=True)
            found.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.student.parameters(), CLIP)
            self.optimizer.step()
            self.step += 1
            if self.step == 1:
                self.first_loss = found.item()
            if self.step % 10 == 0 or self.step == options.steps:
                self._log(found.item())
                show(TRAINING, self.step, options.steps)
            if self.step % every == 0 or self.step == options.steps:
                self._save()
        with torch.no_grad():
            last, agreement = self._loss(self.held_out)
        self.student.save(self.folder, None if self.full_vocab else self.target_ids)
        return Trained(self.folder, self.first_loss, float(last), float(agreement), self.covered,
                       (self.folder / "model.safetensors").stat().st_size)

    def _loss(self, some: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[Tensor, Tensor]:
        """Return the loss over the answers of these sequences, and the top-1 agreement with the model."""
        batch = self._batch(some)
        ids = self.tokens[batch.token_index]  # [B, width]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            hidden = self.student(ids)[batch.rows, batch.positions - 1]  # [N, hidden], to predict each answer token
            logits = self.student.logits(hidden)
        logprobs = logits.float().log_softmax(-1)
        probs, likely = self.top_probs[batch.scores], self.top_ids[batch.scores]  # [N, TOP]
        probs = probs / probs.sum(-1, keepdim=True)
        # The cross entropy with the model's probabilities is the KL divergence plus a constant, the model's entropy.
        soft = -(probs * logprobs.gather(-1, likely)).sum(-1)
        constant = (probs * probs.clamp_min(1e-9).log()).sum(-1)
        hard = F.nll_loss(logprobs, ids[batch.rows, batch.positions], reduction="none")
        best = likely.gather(-1, probs.argmax(-1, keepdim=True))[:, 0]
        agreed = ((logprobs.argmax(-1) == best) & ((best < self.unknown_id) | self.full_vocab)).float().mean()
        return (soft + constant).mean() + 0.1 * hard.mean(), agreed

    def _batch(self, some: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Batch:
        lengths, prompts = self.lengths[some], self.prompts[some]
        width = int(lengths.max())
        columns = np.arange(width)
        inside = columns < lengths[:, None]
        token_index = np.where(inside, self.starts[some][:, None] + columns, 0)
        rows, positions = np.nonzero(inside & (columns >= prompts[:, None]))
        scores = self.scores[some][rows] + positions - prompts[rows]
        return Batch(*(torch.from_numpy(array).to(self.device) for array in (token_index, rows, positions, scores)))

    def _log(self, loss: float) -> None:
        with (self.file.parent / "loss.csv").open("a") as file:
            file.write(f"{self.step},{loss:.4f}\n")

    def _save(self) -> None:
        part = self.file.with_suffix(".part")
        torch.save({"step": self.step, "first_loss": self.first_loss, "student": self.student.state_dict(),
                    "optimizer": self.optimizer.state_dict()}, part)
        part.replace(self.file)

    def _load(self) -> None:
        try:
            stored = torch.load(self.file, map_location=self.device, weights_only=True)
            self.student.load_state_dict(stored["student"])
            self.optimizer.load_state_dict(stored["optimizer"])
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            raise SpilloverError(f"{self.file} cannot be read ({error}); remove it to start over") from error
        self.step, self.first_loss = stored["step"], stored["first_loss"]


def _rate(share: float) -> float:
    """Return the factor on the learning rate after this share of the steps: linear warm-up, then cosine decay."""
    if share < WARMUP:
        return (share + 1e-3) / (WARMUP + 1e-3)
    return LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * (share - WARMUP) / (1 - WARMUP)))
