"""Incremental detokenisation: a sequence's text, token by token, and the stop strings that finish it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from spillover.engine.requests.sampling_params import SamplingParams
from spillover.models.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# An incomplete UTF-8 character spans at most 3 tokens; one more gives the decoder its context.
_CONTEXT_TOKENS = 4
_WINDOW_TOKENS = 16


class IncrementalDetokenizer:
    """The text of one sequence's output.

    The results of `append` and `flush` add up to the result of `tokenizer.decode` for prompt and output together,
    without the prompt's text: a word that follows the prompt keeps its leading space. Text is returned ("shown") once
    later tokens cannot change it. Only a short window of tokens is decoded each time, however long the sequence is.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skip_special = params.skip_special_tokens
        self._hidden = tokenizer.special_ids if params.skip_special_tokens else frozenset[int]()
        self._byte_tokens = _byte_tokens(tokenizer)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._detokenize = params.detokenize
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._parts: list[str] = []
        self._window: list[int] = []  # visible tokens: the last of those shown, and those not shown yet
        self._shown = 0  # number of characters of the window's text that have been shown
        if self._detokenize:
            self._start(prompt_token_ids)

    @property
    def text(self) -> str:
        """Return all text that has been shown."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    @property
    def stopped(self) -> str | None:
        """Return the stop string that was found; nothing is shown after it."""
        return self._stops.matched if self._stops is not None else None

    def append(self, token_id: int) -> str:
        """Process a token; return the new text that is final, often the text of this token."""
        self._num_tokens += 1
        if not self._detokenize or self.stopped is not None:
            return ""
        new = self._decode_next(token_id)
        if self._stops is not None:
            new = self._stops.append(new) if self._num_tokens > self._min_tokens else self._stops.skip(new)
        return self._show(new)

    def flush(self) -> str:
        """Return the rest of the text after the last token, with an incomplete character as U+FFFD."""
        if not self._detokenize or self.stopped is not None:
            return ""
        text = self._decode(self._window)
        new = text[self._shown:]
        self._shown = len(text)
        if self._stops is not None:
            new = self._stops.append(new) if self._num_tokens > self._min_tokens else self._stops.skip(new)
            if self._stops.matched is None:
                new += self._stops.flush()
        return self._show(new)

    def _start(self, prompt: Sequence[int]) -> None:
        """Start the window with the prompt's last tokens, whose text counts as shown except an incomplete character."""
        tail: list[int] = []
        words = 0
        for token in reversed(prompt):
            if self._visible(token):
                tail.append(token)
                words += token not in self._byte_tokens  # runs of byte tokens are kept whole
                if words == _CONTEXT_TOKENS:
                    break
        self._window = tail[::-1]
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT):
            text = self._decode(self._before_bytes()) if self._ends_in_bytes() else text[:-1]
        self._shown = len(text)

    def _decode_next(self, token: int) -> str:
        if not self._visible(token):
            return ""
        self._window.append(token)
        if token in self._byte_tokens:
            return ""  # a run of byte tokens is decoded as a whole, to text or to U+FFFD for each: wait for its end
        text = self._decode(self._window)
        # A U+FFFD at the end may be the start of a character; text before it is final.
        final = len(text) - text.endswith(_REPLACEMENT)
        new = text[self._shown:final]
        self._shown = max(final, self._shown)
        if len(self._window) >= _WINDOW_TOKENS:
            # Decoding goes left to right and resynchronises at any character's first byte, so text after the cut
            # stays the same; only the length of the text before it changes.
            waiting = len(text) - self._shown
            self._window = self._context()
            self._shown = len(self._decode(self._window)) - waiting
        return new

    def _context(self) -> list[int]:
        """Return the end of the window, starting at a token that is not within a run of byte tokens."""
        start = len(self._window) - _CONTEXT_TOKENS
        while start > 0 and self._window[start] in self._byte_tokens:
            start -= 1
        return self._window[start:]

    def _before_bytes(self) -> list[int]:
        end = len(self._window)
        while end > 0 and self._window[end - 1] in self._byte_tokens:
            end -= 1
        return self._window[:end]

    def _ends_in_bytes(self) -> bool:
        return bool(self._window) and self._window[-1] in self._byte_tokens

    def _visible(self, token: int) -> bool:
        # An id beyond the tokenizer's vocabulary (of a padded one) has no text and is no context for decoding.
        return token not in self._hidden and self._tokenizer.backend.id_to_token(token) is not None

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special)

    def _show(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text


class StopStrings:
    """A search for the first stop string in a growing text; it holds back text that may be the start of a match.

    The first match is the one that ends first, however the text is divided; of two that end together, the longer.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""  # the longest suffix of the text that is a proper prefix of a stop string
        self.matched: str | None = None

    def append(self, text: str) -> str:
        """Return the text that is final now; after a match, the text before it (or up to its end, if included)."""
        if self.matched is not None or not text:
            return ""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[:end if self._include else start]
        length = self._beginning(text)
        self._held = text[len(text) - length:]
        return text[:len(text) - length]

    def skip(self, text: str) -> str:
        """Return held text and `text` unsearched: no stop string may match in it or begin in it."""
        return self.flush() + text

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Return the length of the longest suffix of the text that is a proper prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if stop.startswith(text[len(text) - length:]):
                    longest = length
                    break
        return longest


@lru_cache(maxsize=8)
def _byte_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of SentencePiece's byte tokens <0x00> to <0xFF> that the tokenizer has."""
    ids = (tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token for token in ids if token is not None)
