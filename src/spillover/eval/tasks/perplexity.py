"""Perplexity of texts in sliding windows, and, with a reference model, the divergence of the two distributions on the
same tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spillover.errors import SpilloverError
from spillover.eval.divergence import Reference
from spillover.eval.metrics import Metric
from spillover.eval.target import Prompt, Target
from spillover.eval.tasks.base import Answer, DataFile, Item, read_data, text_of

FORM = "a text file, or JSON lines (.jsonl) with a text in each: a field text, content or page"
FIELDS = ("text", "content", "page")
METRICS = (
    Metric("perplexity", "logprob", "tokens", "lower", "perplexity"),
    Metric("word_perplexity", "logprob", "words", "lower", "perplexity", compared=False),
    Metric("byte_perplexity", "logprob", "bytes", "lower", "perplexity", compared=False),
    Metric("bits_per_byte", "logprob", "bytes", "lower", "bits", compared=False),
)


@dataclass(frozen=True)
class Window:
    prompt: Prompt
    share: float  # share of its document's tokens that the window scores
    document: str


class Perplexity:
    def __init__(self, name: str, file: DataFile, window: int, stride: int, reference: Reference | None = None) -> None:
        """Score `stride` tokens at a time, with up to `window` tokens before the last of them."""
        if not 1 <= stride <= window:
            raise SpilloverError(f"--stride is from 1 to --window ({window}); got {stride}")
        self.name = name
        self._documents = _documents(file)
        self._window, self._stride = window, stride
        self._reference = reference
        self.metrics = (*METRICS, *(reference.metrics if reference is not None else ()))
        self.settings: Mapping[str, Any] = {
            **file.settings, "window": window, "stride": stride,
            **({} if reference is None else {"reference": reference.name, "divergence": reference.kind})}

    def items(self, target: Target) -> list[Item]:
        if target.max_len is not None and self._window + 2 > target.max_len:
            raise SpilloverError(f"--window {self._window} needs a context of {self._window + 2} tokens and "
                                 f"{target.name} has {target.max_len}; give --window {target.max_len - 2} or less")
        return [Item(f"{index}.{place}", window) for index, text in enumerate(self._documents)
                for place, window in enumerate(self._cut(target, text))]

    def ask(self, target: Target, item: Item) -> Answer:
        window: Window = item.ask
        more: dict[str, float] = {}
        if self._reference is None:
            (logprobs,) = target.score([window.prompt])
        else:
            logprobs, more = self._reference.compare(target, item.id, window.prompt)
        return Answer({"logprob": sum(logprobs), "tokens": len(logprobs),
                       "words": window.share * len(re.split(r"\s+", window.document)),
                       "bytes": window.share * len(window.document.encode()), **more})

    def _cut(self, target: Target, text: str) -> Iterator[Window]:
        ids = target.encode(text, special=False)
        prefix = [] if target.prefix is None else [target.prefix]
        for prompt in windows([*prefix, *ids], self._window, self._stride):
            yield Window(prompt, (len(prompt.token_ids) - prompt.start) / max(1, len(ids)), text)


def perplexity(name: str, folder: Path, given: str | None, window: int, stride: int,
               reference: Reference | None) -> Perplexity:
    names = ("wiki.test.raw", "perplexity.txt", "perplexity.jsonl")
    return Perplexity(name, read_data(name, folder, given, names, FORM), window, stride, reference)


def windows(ids: Sequence[int], window: int, stride: int) -> Iterator[Prompt]:
    """Yield prompts that score every token but the first once: the first `window` tokens, then `stride` at a time, each
    given up to `window` tokens before it. With stride == window these are lm_eval's rolling windows."""
    end = min(window + 1, len(ids))
    start = 1
    while start < len(ids):
        first = max(0, end - window - 1)
        yield Prompt(list(ids[first:end]), start - first)
        start, end = end, min(end + stride, len(ids))


def _documents(file: DataFile) -> list[str]:
    text = text_of(file)
    found = [text]
    if file.path.suffix == ".jsonl":
        found = []
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    row = json.loads(line)
                    found.append(str(next(row[name] for name in FIELDS if name in row)))
                except (ValueError, TypeError, StopIteration) as error:
                    raise SpilloverError(f"'{file.path}', line {number}, has no text; the file must be "
                                         f"{FORM}") from error
    if not any(each.strip() for each in found):
        raise SpilloverError(f"'{file.path}' has no text; the file must be {FORM}")
    return found
