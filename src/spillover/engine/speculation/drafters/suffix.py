"""Suffix drafting: find the longest suffix of a request's tokens that occurred before, in the request or in recent
requests of the same `cache_salt`, and follow the most frequent continuation from there.

The set of positions at which a suffix ends stands for a node of a suffix tree; a step down the tree keeps the positions
that continue with the chosen token, so no tree is built. A request's tokens are searched with one pass of numpy; those
of finished requests are in a ring, where the positions of each run of three tokens form a chain, newest first.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from spillover.engine.speculation.drafters.drafter import NOTHING, Draft
from spillover.engine.speculation.drafters.ngram import longest_matches
from spillover.memory.kv.digest import root_digest

if TYPE_CHECKING:
    from spillover.engine.requests.request import Request
    from spillover.memory.tiers.token_log import TokenLog

LONGEST = 32  # maximum tokens of a suffix that are compared
SHORTEST = 2  # minimum tokens of a match in the request itself; in finished requests it is RUN
RUN = 3  # tokens of the runs by which finished requests are indexed
PLACES = 16  # maximum positions that vote on the next token, the newest ones
SEEN = 64  # maximum positions of a chain that are examined
LEAST_CHANCE = 0.05  # minimum chance that all tokens of a draft are right; below it the draft ends
CORPUS_TOKENS = 1 << 17  # maximum tokens kept of finished requests, over all salts
LAST_TOKENS = 2048  # maximum tokens kept per request: adding one takes about a microsecond on the engine thread
MOST_SALTS = 256  # maximum number of salts whose tokens are kept
_END = -1  # separator between two requests


class SuffixDrafter:
    expected = None
    sequential = False

    def __init__(self, corpus_tokens: int = CORPUS_TOKENS, tokens: TokenLog | None = None) -> None:
        """Keep up to `corpus_tokens` tokens of finished requests, over all salts. `tokens`: a log to load tokens from
        and append them to; it identifies salts by their digests, as does this class."""
        self._capacity = corpus_tokens
        self._rings: OrderedDict[bytes, TokenRing] = OrderedDict()  # by digest of the salt, least recently used first
        self._log = tokens
        if tokens is not None:
            for salt, token_ids in tokens.load():
                self._keep(salt, token_ids)

    def propose(self, requests: Sequence[tuple[Request, int]]) -> list[Draft]:
        return [self._draft(request, most) for request, most in requests]

    def end(self, request: Request) -> None:
        """Keep the tokens of a finished request, to draft for requests of the same salt."""
        salt, token_ids = _digest(request.cache_salt), request.token_ids[-min(self._capacity - 1, LAST_TOKENS):]
        self._keep(salt, token_ids)
        if self._log is not None:
            self._log.append(salt, token_ids)

    def _keep(self, salt: bytes, token_ids: Sequence[int]) -> None:
        ring = self._rings.get(salt)
        if ring is None:
            ring = self._rings[salt] = TokenRing()
        self._rings.move_to_end(salt)
        ring.add(token_ids)
        while sum(map(len, self._rings.values())) > self._capacity or len(self._rings) > MOST_SALTS:
            oldest = next(iter(self._rings))
            if len(self._rings) > 1:
                del self._rings[oldest]
            else:
                self._rings[oldest].drop(len(self._rings[oldest]) - self._capacity)

    @property
    def num_kept(self) -> int:
        return sum(map(len, self._rings.values()))

    def _draft(self, request: Request, most: int) -> Draft:
        if most < 1:
            return NOTHING
        tokens = request.token_ids
        found: list[Draft] = []
        length, ends = longest_matches(np.frombuffer(tokens, np.int32), LONGEST)
        if length >= SHORTEST:
            places = [end + 1 for end in ends[-PLACES:].tolist()]
            found.append(_descend(places, length, most, _within(tokens)))
        salt = _digest(request.cache_salt)
        ring = self._rings.get(salt)
        if ring is not None:
            self._rings.move_to_end(salt)
            length, places = ring.matches(tokens)
            if places:
                found.append(_descend(places, length, most, lambda place, _: ring.token(place)))
        return max(found, key=_expected, default=NOTHING)


@lru_cache(maxsize=MOST_SALTS)
def _digest(salt: str | None) -> bytes:
    return root_digest(b"suffix", salt)


class TokenRing:
    """The tokens of finished requests, of which the oldest are dropped, with an index of runs of tokens."""

    def __init__(self) -> None:
        self._tokens = array("i")
        self._before = array("q")  # per token: position of the previous occurrence of the run that it ends; -1: none
        self._newest: dict[tuple[int, int, int], int] = {}  # run of tokens -> position of its newest last token
        self._first = 0  # position of the first token that is kept; positions are never reused

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, tokens: Sequence[int]) -> None:
        place, newest, before = self._first + len(self._tokens), self._newest, self._before
        self._tokens.extend(tokens)
        self._tokens.append(_END)
        before.extend([-1] * (len(tokens) + 1))
        first = self._first
        for index in range(RUN - 1, len(tokens)):
            run = (tokens[index - 2], tokens[index - 1], tokens[index])
            before[place + index - first] = newest.get(run, -1)
            newest[run] = place + index

    def drop(self, count: int) -> None:
        """Drop the `count` oldest tokens, and an eighth of all tokens more, so that drops are rare."""
        count = min(len(self._tokens), count + len(self._tokens) // 8)
        del self._tokens[:count], self._before[:count]
        self._first += count
        self._newest = {run: place for run, place in self._newest.items() if place >= self._first + RUN - 1}

    def token(self, place: int) -> int:
        return self._tokens[place - self._first]

    def matches(self, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Return how many of the last tokens, up to LONGEST, occur here, and the positions after them, oldest first."""
        if len(tokens) < RUN:
            return 0, []
        kept, first, count = self._tokens, self._first, len(tokens)
        place = self._newest.get((tokens[-3], tokens[-2], tokens[-1]), -1)
        longest, places, seen = 0, list[int](), 0
        while place >= first + RUN - 1 and seen < SEEN and len(places) < PLACES:
            index, length = place - first, RUN
            most = min(LONGEST, count, index + 1)
            while length < most and kept[index - length] == tokens[count - 1 - length]:
                length += 1
            if length > longest:
                longest, places = length, []
            if length == longest:
                places.append(place + 1)
            place, seen = self._before[index], seen + 1
        return longest, places[::-1]


def _within(tokens: Sequence[int]) -> Callable[[int, list[int]], int]:
    """Return a function that reads a request's tokens, and after them its draft, so that a period can continue."""
    count = len(tokens)
    return lambda place, draft: tokens[place] if place < count else draft[place - count]


def _descend(places: list[int], length: int, most: int, read: Callable[[int, list[int]], int]) -> Draft:
    """Follow the most frequent continuation from `places`, the newest of equally frequent ones; return the draft."""
    draft: list[int] = []
    confidence: list[float] = []
    chance = 1.0
    while len(draft) < most:
        if len(places) == 1:
            token, following, votes = read(places[0], draft), [], 1
            sure = length / (length + 1)
        else:
            following = [read(place, draft) for place in places]
            token, votes = following[-1], len(following)
            if following.count(token) != votes:
                token, votes = Counter(reversed(following)).most_common(1)[0]
            sure = votes / (len(following) + 1 / length)  # a longer match needs fewer occurrences
        chance *= sure
        if token == _END or chance < LEAST_CHANCE:
            break
        draft.append(token)
        confidence.append(sure)
        places = ([place + 1 for place, next_token in zip(places, following, strict=True) if next_token == token]
                  if following else [places[0] + 1])
        length += 1
    return Draft(tuple(draft), tuple(confidence))


def _expected(draft: Draft) -> float:
    """Return the expected number of right tokens of a draft."""
    total, chance = 0.0, 1.0
    for sure in draft.confidence:
        chance *= sure
        total += chance
    return total
