"""A workload as text, for endpoints that accept no token ids: chat, and servers that accept only text.

Text is not tokenised to the same tokens again, and a chat template adds its own, so lengths are recounted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spillover.bench.serving.serve_request import ServeRequest, ServeWorkload
from spillover.bench.serving.served_model import ServedModel, TextTokenizer
from spillover.bench.workloads.sharing import Part
from spillover.bench.workloads.workload_stats import Shape, WorkloadStats, measure
from spillover.bench.workloads.workloads_recorded import RecordedWorkload
from spillover.errors import SpilloverError


def as_text(workload: ServeWorkload, served: ServedModel, chat: bool = True) -> ServeWorkload:
    """Return the workload with text prompts. `chat`: the endpoint applies the chat template to them."""
    return TextWorkload(workload, served.tokenizer, chat)


@dataclass(frozen=True)
class TextWorkload:
    inner: ServeWorkload
    tokenizer: TextTokenizer | None
    chat: bool = True

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def shapes(self) -> Sequence[Shape]:
        """Return the shapes with the template's tokens around each session's first turn; all share the opening."""
        templated = isinstance(self.inner, RecordedWorkload) and self.inner.templated
        if not self.chat or templated or self.tokenizer is None:
            return self.inner.shapes
        opening, closing = _template(self.tokenizer)
        return [replace(shape, parts=(Part("opening", opening), *shape.parts, Part(("closing", index), closing)))
                if shape.turn == 0 else shape for index, shape in enumerate(self.inner.shapes)]

    def requests(self, repeat: int) -> list[ServeRequest]:
        inner = self.inner.in_words() if isinstance(self.inner, RecordedWorkload) else self.inner
        return [self._as_text(request) for request in inner.requests(repeat)]

    def stats(self) -> WorkloadStats:
        stats = self.inner.stats()
        notes = (*stats.notes, "Sent as text: lengths as the server counts them may differ by a few tokens")
        return replace(measure(self.name, self.shapes, stats.estimated), notes=notes)

    def _as_text(self, request: ServeRequest) -> ServeRequest:
        text, tokenizer = request.prompt, self.tokenizer
        if not isinstance(text, str):
            if tokenizer is None:
                raise SpilloverError(f"the workload {self.name} is made of token ids, and there is no tokenizer to "
                                     "write them as text: give --tokenizer, a model folder or GGUF file")
            text = tokenizer.decode(text)
        if tokenizer is None:
            return request
        ids = tokenizer.chat(text) if self.chat and request.turn == 0 else tokenizer.encode(text)
        return replace(request, prompt=text, prompt_len=len(ids))


def _template(tokenizer: TextTokenizer) -> tuple[int, int]:
    """Return how many tokens a chat template puts before a message, and how many after."""
    one, other = tokenizer.chat("one"), tokenizer.chat("two three")
    return _alike(one, other), _alike(one[::-1], other[::-1])


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
