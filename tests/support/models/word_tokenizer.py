"""A tokenizer that needs no file: one id per word, and a vocabulary to draw ids from."""

from __future__ import annotations

from collections.abc import Sequence

from spillover.bench.workloads.workloads import Vocabulary

BEGIN, USER = 0, 1
SPECIAL = frozenset({BEGIN, USER})


class WordTokenizer:
    """Numbers words in the order of their first use; every text begins with a special token, as Llama's do."""

    def __init__(self) -> None:
        self.vocabulary = Vocabulary(5000, SPECIAL)
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [BEGIN, *(self._ids.setdefault(word, len(self._ids) + 2) for word in text.split())]

    def chat(self, text: str) -> list[int]:
        return [BEGIN, USER, *self.encode(text)[1:]]

    def decode(self, ids: Sequence[int]) -> str:
        words = {index: word for word, index in self._ids.items()}
        return " ".join(words.get(index, f"w{index}") for index in ids if index not in SPECIAL)
