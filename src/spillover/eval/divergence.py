"""Distance of a model's distributions from a reference's on the same tokens: KL divergence and top-1 agreement.

At every scored token, with p the reference's distribution over the next token and q the model's, both given the same
tokens before it, KL(p || q) = sum over the vocabulary of p (log p - log q), in nats; top-1 agreement is whether both
have the same likeliest token. The reference runs first, alone; its results are kept in a folder until the model runs.

- `FullReference`, both in this process: the whole log softmax is stored in float16 and normalised again when it is
  read, which keeps a model's divergence from itself below 1e-6. There is one file per window, with 2 bytes per token
  and vocabulary entry.
- `TopReference`, if one of them is behind a URL: the TOP likeliest tokens of either. Tokens that both list are used as
  they are and all others are merged into one: never more than the true divergence, hence a lower bound.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from spillover.errors import SpilloverError
from spillover.eval.in_process import EngineTarget
from spillover.eval.metrics import Metric
from spillover.eval.pool import answers
from spillover.eval.target import Prompt, Target

if TYPE_CHECKING:
    from torch import Tensor

TOP = 20  # the maximum that servers return
_SHARED = (Metric("top1_agreement", "same_top", "tokens"),
           Metric("reference_perplexity", "reference_logprob", "tokens", "lower", "perplexity", compared=False))


class Reference(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def metrics(self) -> tuple[Metric, ...]: ...

    def prepare(self, target: Target, windows: Mapping[str, Prompt], concurrency: int) -> None:
        """Run the reference model on windows that are not in the folder yet."""

    def has(self, settings: Mapping[str, Any], limit: int | None) -> bool:
        """Return whether the folder has all windows of these settings, or the first `limit`."""

    def note(self, settings: Mapping[str, Any], windows: int, whole: bool) -> None:
        """Record how many windows the folder has; `whole`: whether they are all."""

    def compare(self, target: Target, window: str, prompt: Prompt) -> tuple[list[float], dict[str, float]]:
        """Return the target's log probabilities of a window's tokens, and the values that the metrics sum up."""


class _Stored(ABC):
    """Windows of a reference in a folder: one .json per window, written once the window is complete."""

    metrics: tuple[Metric, ...]
    kind: str

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpilloverError(f"cannot write --reference-dir '{folder}': {error.strerror or error}") from error

    def has(self, settings: Mapping[str, Any], limit: int | None) -> bool:
        try:
            noted = json.loads((self.folder / "windows.json").read_text())
        except FileNotFoundError:
            return False
        return bool(noted["settings"] == json.loads(json.dumps(settings))
                    and (noted["whole"] or (limit is not None and limit <= noted["windows"])))

    def note(self, settings: Mapping[str, Any], windows: int, whole: bool) -> None:
        self._write("windows.json", {"settings": settings, "windows": windows, "whole": whole})

    def prepare(self, target: Target, windows: Mapping[str, Prompt], concurrency: int) -> None:
        def ask(window: str) -> None:
            try:
                self._store(window, windows[window], self._ask(target, window, windows[window]))
            except OSError as error:
                raise SpilloverError(f"cannot write to '{self.folder}': {error.strerror or error}") from error

        left = [window for window, prompt in windows.items() if self._known(window, prompt) is None]
        for _ in answers(ask, left, concurrency, "reference", len(windows) - len(left)):
            pass

    @abstractmethod
    def _ask(self, target: Target, window: str, prompt: Prompt) -> dict[str, Any]:
        """Return the reference's answer for the window's .json."""

    def _store(self, window: str, prompt: Prompt, answer: Mapping[str, Any]) -> None:
        self._write(f"{window}.json",
                    {"reference": self.name, "kind": self.kind, "prompt": _digest(prompt), **answer})

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        draft = self.folder / f"{name}.part"
        draft.write_text(json.dumps(content))
        os.replace(draft, self.folder / name)

    def _known(self, window: str, prompt: Prompt) -> dict[str, Any] | None:
        try:
            kept: dict[str, Any] = json.loads((self.folder / f"{window}.json").read_text())
        except FileNotFoundError:
            return None
        same = {"reference": self.name, "kind": self.kind, "prompt": _digest(prompt)}
        other = next((name for name, value in same.items() if kept.get(name) != value), None)
        if other is not None:
            raise SpilloverError(f"'{self.folder}' has results with another {other}; give another --reference-dir, "
                                 "or delete the folder")
        return kept

    def _answer(self, window: str, prompt: Prompt) -> dict[str, Any]:
        kept = self._known(window, prompt)
        assert kept is not None, "asked of the reference before"
        return kept


class FullReference(_Stored):
    kind = "full vocabulary"
    metrics = (Metric("kl_divergence", "kl", "tokens", "lower"), *_SHARED)

    def _ask(self, target: Target, window: str, prompt: Prompt) -> dict[str, Any]:
        import torch

        found: dict[int, tuple[Any, list[int]]] = {}  # by position, as a preempted request visits one twice

        def visit(position: int, logits: Tensor) -> None:
            rows = torch.log_softmax(logits.float(), -1)
            found[position] = rows.half().cpu().numpy(), logits.argmax(-1).tolist()

        assert isinstance(target, EngineTarget)
        logprobs = target.visit(prompt, visit)
        parts = [found[position] for position in sorted(found)]
        draft = self.folder / f"{window}.npy.part"
        with draft.open("wb") as file:
            np.save(file, np.concatenate([rows for rows, _ in parts]))
        os.replace(draft, self.folder / f"{window}.npy")
        return {"logprobs": logprobs, "top": [token for _, tops in parts for token in tops]}

    def compare(self, target: Target, window: str, prompt: Prompt) -> tuple[list[float], dict[str, float]]:
        import torch

        kept = self._answer(window, prompt)
        reference = np.load(self.folder / f"{window}.npy", mmap_mode="c")  # [P, V]
        found: dict[int, tuple[float, int]] = {}  # by position, as a preempted request visits one twice
        other: list[int] = []

        def visit(position: int, logits: Tensor) -> None:
            if logits.shape[1] != reference.shape[1]:
                other.append(logits.shape[1])
                return
            first = position - prompt.start
            rows = torch.from_numpy(np.array(reference[first:first + len(logits)])).to(logits.device)
            kl = divergence(rows, logits)
            tops = logits.argmax(-1).tolist()
            same = sum(a == b for a, b in zip(tops, kept["top"][first:first + len(tops)], strict=True))
            found[position] = float(kl.sum()), same

        assert isinstance(target, EngineTarget)
        logprobs = target.visit(prompt, visit)
        if other:
            raise SpilloverError(f"the reference has a vocabulary of {reference.shape[1]} tokens and {target.name} one "
                                 f"of {other[0]}: they are not variants of one model")
        return logprobs, {"kl": sum(kl for kl, _ in found.values()),
                          "same_top": float(sum(same for _, same in found.values())),
                          "reference_logprob": sum(kept["logprobs"])}


def divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """Return KL(p || q) of each row, [P]: p the normalised exp of `reference`, q the softmax of logits, [P, V]."""
    import torch

    log_p = torch.log_softmax(reference.float(), -1)
    p, log_q = log_p.exp(), torch.log_softmax(logits.float(), -1)
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1, dtype=torch.float64)


class TopReference(_Stored):
    kind = f"top {TOP}"
    metrics = (Metric("kl_divergence_at_least", "kl", "tokens", "lower"), *_SHARED)

    def _ask(self, target: Target, window: str, prompt: Prompt) -> dict[str, Any]:
        return {"rows": [list(row.items()) for row in target.top(prompt, TOP)]}

    def compare(self, target: Target, window: str, prompt: Prompt) -> tuple[list[float], dict[str, float]]:
        reference = [dict(row) for row in self._answer(window, prompt)["rows"]]
        rows = target.top(prompt, TOP)
        tokens = prompt.token_ids[prompt.start:]
        return [row[token] for row, token in zip(rows, tokens, strict=True)], {
            "kl": sum(least_divergence(p, q) for p, q in zip(reference, rows, strict=True)),
            "same_top": float(sum(_likeliest(p) == _likeliest(q) for p, q in zip(reference, rows, strict=True))),
            "reference_logprob": sum(row[token] for row, token in zip(reference, tokens, strict=True))}


def least_divergence(reference: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Return KL(p || q), given log probabilities by token; tokens that not both list are merged into one."""
    shared = reference.keys() & other.keys()
    total = sum(math.exp(reference[token]) * (reference[token] - other[token]) for token in shared)
    rest, other_rest = (1 - math.fsum(math.exp(row[token]) for token in shared) for row in (reference, other))
    if rest > 1e-9 and other_rest > 1e-9:  # otherwise only rounding
        total += rest * math.log(rest / other_rest)
    return max(0.0, total)


def _likeliest(row: Mapping[int, float]) -> int:
    return max(row, key=lambda token: (row[token], -token))


def _digest(prompt: Prompt) -> str:
    tokens: Sequence[int] = [prompt.start, *prompt.token_ids]
    return hashlib.sha256(np.array(tokens, dtype=np.int64).tobytes()).hexdigest()
