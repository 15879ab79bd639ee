"""The text of single tokens, as shown in log probabilities."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from functools import cached_property

from spillover.models.tokenizer import Tokenizer


class TokenTexts:
    """A cache of the exact bytes and printable names of tokens."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, str] = {}

    def raw(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self.tokenizer.token_bytes(token) if self.tokenizer is not None else b""
        return known

    def name(self, token: int, as_id: bool = False) -> str:
        """Return a token's text; OpenAI's `bytes:\\xe2\\x80` for a part of a character, `token_id:7` with `as_id`."""
        if as_id or self.tokenizer is None:
            return f"token_id:{token}"
        known = self._names.get(token)
        if known is None:
            raw = self.raw(token)
            try:
                known = raw.decode()
            except UnicodeDecodeError:
                known = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            self._names[token] = known
        return known

    @cached_property
    def longest(self) -> int:
        """Return the length in bytes of the longest token."""
        size = self.tokenizer.vocab_size if self.tokenizer is not None else 0
        return max((len(self.raw(token)) for token in range(size)), default=1)

    def is_hidden(self, token: int, skip_special: bool) -> bool:
        return self.tokenizer is None or (skip_special and token in self.tokenizer.special_ids)


class TextOffsets:
    """Start offsets of tokens in the text, in characters; a part of a character has the offset of the character."""

    def __init__(self, texts: TokenTexts, skip_special: bool) -> None:
        self._texts = texts
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def take(self, tokens: Iterable[int]) -> list[int]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            if not self._texts.is_hidden(token, self._skip_special):
                self._offset += len(self._decoder.decode(self._texts.raw(token)))
        return offsets
