"""A backend that records the requests of programs to another backend, and a function that computes how many of their
tokens a cache could have had."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spillover.programs.backend import Answer, Backend, Message, OnText, Prompt, Score, TokenCounts
from spillover.programs.lifetime import Lifetime


@dataclass
class RecordedRequest:
    """One request: its prompt, how many of its tokens may come from a cache, and the generated tokens."""

    ids: list[int]
    usable: int
    generated: list[int]
    begun_before_its_end: int = 0  # number of requests that had begun when this one finished


class RecordingBackend:
    """A backend that records requests to another one, which must tokenize and render."""

    tokenizes = renders = True

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.name = inner.name
        self.gate = inner.gate
        self.requests: list[RecordedRequest] = []  # in the order in which they began
        self.open = 0  # number of unfinished requests
        self.counts = TokenCounts()
        self._lock = threading.Lock()

    def encode(self, text: str, special: bool = False) -> list[int]:
        return self.inner.encode(text, special)

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(ids)

    def render(self, messages: Sequence[Message]) -> list[int]:
        return self.inner.render(messages)

    def generate(self, prompt: Prompt, options: Mapping[str, Any], lifetime: Lifetime, on_text: OnText) -> Answer:
        assert prompt.ids is not None
        note = self._begin(prompt.ids, len(prompt.ids) - 1)
        try:
            answer = self.inner.generate(prompt, options, lifetime, on_text)
        finally:
            self._end(1)
        self._count(answer.counts)
        note.generated = list(answer.token_ids or ())
        with self._lock:
            note.begun_before_its_end = len(self.requests)
        return answer

    def score(self, prompts: Sequence[list[int]], start: int, lifetime: Lifetime) -> list[Score]:
        for ids in prompts:
            self._begin(ids, start - 1)
        try:
            scores = self.inner.score(prompts, start, lifetime)
        finally:
            self._end(len(prompts))
        for score in scores:
            self._count(score.counts)
        return scores

    def close(self) -> None:
        self.inner.close()

    def _begin(self, ids: list[int], usable: int) -> RecordedRequest:
        note = RecordedRequest(list(ids), usable, [])
        with self._lock:
            self.requests.append(note)
            self.open += 1
        return note

    def _count(self, counts: TokenCounts) -> None:
        with self._lock:
            self.counts += counts

    def _end(self, count: int) -> None:
        with self._lock:
            self.open -= count


def findable(requests: Sequence[RecordedRequest], block_size: int, settled: bool = False) -> int:
    """Return the prompt tokens that these requests, run one after another, would find in an unlimited cache. `settled`:
    count generated tokens only if their request had finished by then."""
    known: set[tuple[int, ...]] = set()
    found = 0
    for index, each in enumerate(requests):
        for before in requests[:index] if settled else ():
            if before.begun_before_its_end <= index:
                known.update(_blocks([*before.ids, *before.generated[:-1]], block_size))
        usable = each.usable // block_size
        found += block_size * next(
            (count for count in range(usable) if tuple(each.ids[:(count + 1) * block_size]) not in known), usable)
        known.update(_blocks(each.ids if settled else [*each.ids, *each.generated[:-1]], block_size))
    return found


def _blocks(ids: Sequence[int], size: int) -> set[tuple[int, ...]]:
    return {tuple(ids[:end]) for end in range(size, len(ids) + 1, size)}
