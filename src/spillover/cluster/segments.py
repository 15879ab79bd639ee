"""Tokenises conversations in segments: text between special tokens is encoded by itself and cached, so only the new
part of a conversation takes time. A router sees the same beginnings again and again."""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict

from spillover.models.tokenizer import Tokenizer

MOST_CHARACTERS = 16 << 20  # of all cached segments; with their tokens they take about twice that in bytes
LEAST_CHARACTERS = 64  # a shorter segment is encoded faster than it is looked up

_PROBES = ("", "a", " a", "a ", "\n", "user\nHello,  world!\n", "\n\n  two", "caf\u00e9 \u4f60\u597d", "1234567 x")


class SegmentEncoder:
    """An encoder with the tokenizer's results, without adding special tokens."""

    def __init__(self, tokenizer: Tokenizer, most_characters: int = MOST_CHARACTERS) -> None:
        self._tokenizer = tokenizer
        self._most = most_characters
        self._known: OrderedDict[str, array[int]] = OrderedDict()  # segment -> tokens, least recently used first
        self._characters = 0
        self._lock = threading.Lock()
        self._special = {tokenizer.token_bytes(index).decode(errors="replace"): index
                         for index in tokenizer.special_ids}
        names = sorted(filter(None, self._special), key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None
        # Most tokenizers encode text between special tokens independently of its context; with others it is not split.
        self.cuts = self._cut is not None and self._may_cut(names)

    def encode(self, text: str) -> list[int]:
        if not self.cuts or self._cut is None:
            return self._tokenizer.encode(text, False)
        ids: list[int] = []
        for place, segment in enumerate(self._cut.split(text)):
            if place % 2:
                ids.append(self._special[segment])
            elif segment:
                ids.extend(self._encode_segment(segment))
        return ids

    def _encode_segment(self, text: str) -> array[int] | list[int]:
        if len(text) < LEAST_CHARACTERS:
            return self._tokenizer.encode(text, False)
        with self._lock:
            found = self._known.get(text)
            if found is not None:
                self._known.move_to_end(text)
                return found
        made = array("i", self._tokenizer.encode(text, False))
        with self._lock:
            if text not in self._known and len(text) <= self._most:
                self._known[text] = made
                self._characters += len(text)
            while self._characters > self._most:
                self._characters -= len(self._known.popitem(last=False)[0])
        return made

    def _may_cut(self, names: list[str]) -> bool:
        encode = self._tokenizer.encode
        for name in (*names[:4], *names[-4:]):
            for before in _PROBES:
                for after in _PROBES:
                    if encode(before + name + after, False) != [*encode(before, False), self._special[name],
                                                                *encode(after, False)]:
                        return False
        return True
