"""A draft model with a different tokenizer: it gets the same text in its tokens, and its drafts are translated back.

For each request the draft model's tokens of its text are kept. New text may change the last few of them, as tokens may
join, so only the end is encoded again; the draft model's KV of earlier tokens stays valid. A draft is decoded to text
and encoded by the target's tokenizer; a last token that more text could change is dropped. Errors here cannot change
the output, because the target model verifies every draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spillover.engine.speculation.drafters.vocabulary import make_draft_request
from spillover.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from spillover.engine.requests.request import Request

OPEN_BYTES = 512  # approximate maximum of bytes at the end of a request's text that are encoded again with new text
KEPT_OPEN = 128  # minimum bytes that stay open, to be encoded again, when tokens before them are fixed
CONTEXT = 12  # maximum tokens before a draft that are encoded together with it


@dataclass
class _DraftState:
    request: Request  # the request in the draft model's tokens
    fixed: int  # number of its leading tokens that no longer change
    seen: int = 0  # number of the target's tokens whose text was added
    open: bytearray = field(default_factory=bytearray)  # the text after the fixed tokens
    missing: bytes = b""  # the end of `open` if it is an incomplete character


class TranslatedVocabulary:
    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self._target = _Words(target)
        self._draft = _Words(draft)
        self._begin = draft.encode("", add_special_tokens=True)
        self._states: dict[Request, _DraftState] = {}

    def draft_request(self, request: Request) -> Request:
        state = self._states.get(request)
        if state is None:
            made = make_draft_request(request, self._begin, 1, greedy=True)
            state = self._states[request] = _DraftState(made, len(self._begin))
        if state.seen < len(request.token_ids):
            state.open += b"".join(map(self._target.bytes_of, request.token_ids[state.seen:]))
            state.seen = len(request.token_ids)
            self._encode(state)
        return state.request

    def to_target(self, request: Request, draft: Sequence[int]) -> tuple[int, ...]:
        missing, text, ends = self._states[request].missing, b"", False
        for token in draft:
            if token in self._draft.ends:
                ends = True
                break
            text += self._draft.bytes_of(token)
        if not text.startswith(missing):
            return ()
        text = text[len(missing):]
        found = self._encoded(request, _complete(text)) if text else []
        if found and not ends and self._target.bytes_of(found[-1]) != self._draft.bytes_of(draft[-1]):
            found.pop()  # more text could make it another token
        if ends and self._target.end is not None:
            found.append(self._target.end)
        return tuple(found)

    def end(self, request: Request) -> None:
        self._states.pop(request, None)

    def _encode(self, state: _DraftState) -> None:
        """Encode the open text again, and fix the tokens of its beginning if it is longer than OPEN_BYTES."""
        text = _complete(bytes(state.open))
        state.missing = bytes(state.open[len(text):])
        if len(text) > OPEN_BYTES:
            place = self._draft.split(text, len(text) - KEPT_OPEN)
            if place:
                ids = self._draft.encode(text[:place], not state.fixed or state.fixed == len(self._begin))
                tokens = state.request.token_ids
                del tokens[state.fixed:]
                tokens.extend(ids)
                state.fixed = len(tokens)
                del state.open[:place]
                text = text[place:]
        tokens = state.request.token_ids
        del tokens[state.fixed:]
        tokens.extend(self._draft.encode(text, state.fixed == len(self._begin)))
        if not tokens:  # there is no text: any token will do
            tokens.append(0)

    def _encoded(self, request: Request, text: bytes) -> list[int]:
        """Return the target's tokens of a text that follows its last tokens; [] if the text would change these."""
        known = request.token_ids[-CONTEXT:].tolist()
        for first in range(len(known)):
            before = known[first:]
            ids = self._target.encode(b"".join(map(self._target.bytes_of, before)) + text, first == 0)
            if ids[:len(before)] == before:
                return ids[len(before):]
        return []


class _Words:
    """A tokenizer on bytes. If it prepends a space to every text, that space stands for a text's own leading space."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.ends = frozenset(tokenizer.eos_token_ids)
        self.end = tokenizer.eos_token_id
        self._bytes: dict[int, bytes] = {}
        alone = tokenizer.encode("a", add_special_tokens=False)
        self._prepends = bool(alone) and tokenizer.token_bytes(alone[0]).startswith(b" ")

    def bytes_of(self, token: int) -> bytes:
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._tokenizer.token_bytes(token)
        return found

    def encode(self, text: bytes, begins: bool) -> list[int]:
        """Return the tokens of a text; `begins`: whether it is at the beginning of a sequence."""
        if self._prepends and not begins and text.startswith(b" "):
            text = text[1:]
        return self._tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False)

    def split(self, text: bytes, before: int) -> int:
        """Return an index below `before` where a text can be cut without changing its tokens; 0 if none was found."""
        place = text.rfind(b" ", 1, before)
        for _ in range(4):
            if place <= 0:
                return 0
            if text[place - 1:place] not in (b" ", b"\n", b"\t"):
                return place
            place = text.rfind(b" ", 1, place)
        return 0


def _complete(text: bytes) -> bytes:
    """Return a text without the incomplete character at its end, if there is one."""
    for count in range(1, min(4, len(text) + 1)):
        byte = text[-count]
        if byte & 0xC0 == 0xC0:  # the first byte of a multi-byte character
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return text[:-count] if count < needed else text
        if byte < 0x80:
            break
    return text
