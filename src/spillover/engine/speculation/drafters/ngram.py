"""Prompt lookup: if the last tokens occurred before in the same request, the tokens that followed them are the draft.

No index is kept: one pass over the tokens finds all earlier occurrences of the last one, and each further token that is
compared leaves fewer of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from spillover.engine.speculation.drafters.drafter import NOTHING, Draft

if TYPE_CHECKING:
    from spillover.engine.requests.request import Request

SEARCHED = 1 << 15  # maximum number of last tokens of a request that are searched

Tokens = npt.NDArray[np.int32]
Positions = npt.NDArray[np.int64]


class NgramDrafter:
    expected = None
    sequential = False

    def __init__(self, shortest: int, longest: int) -> None:
        """Make the drafter. `shortest`: minimum tokens of a match; `longest`: maximum tokens that are compared."""
        self._shortest = shortest
        self._longest = longest

    def propose(self, requests: Sequence[tuple[Request, int]]) -> list[Draft]:
        return [self._draft(np.frombuffer(request.token_ids, np.int32), most) for request, most in requests]

    def end(self, request: Request) -> None:
        """Do nothing: the drafter keeps no state."""

    def _draft(self, tokens: Tokens, most: int) -> Draft:
        length, found = longest_matches(tokens, self._longest)
        if length < self._shortest or most < 1:
            return NOTHING
        draft = copied(tokens, int(found[-1]) + 1, most)
        return Draft(draft, (1.0,) * len(draft))


def longest_matches(tokens: Tokens, longest: int) -> tuple[int, Positions]:
    """Return the length of the longest earlier match of the last tokens, up to `longest`, and where each match ends."""
    if len(tokens) < 2:
        return 0, np.empty(0, dtype=np.int64)
    skipped = max(0, len(tokens) - SEARCHED)
    ends = np.flatnonzero(tokens[skipped:-1] == tokens[-1]) + skipped
    if not len(ends):
        return 0, ends
    length = 1
    while length < longest and length < len(tokens) - 1:
        whole = ends if ends[0] >= length else ends[np.searchsorted(ends, length):]  # drop those cut by the beginning
        longer = whole[tokens[whole - length] == tokens[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return length, ends


def copied(tokens: Tokens, start: int, count: int) -> tuple[int, ...]:
    """Return `count` tokens from index `start` on; after the last token the copy repeats, as in a periodic text."""
    period = len(tokens) - start
    if count <= period:
        return tuple(tokens[start:start + count].tolist())
    part = tokens[start:].tolist()
    return tuple((part * (count // period + 1))[:count])
