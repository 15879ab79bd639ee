"""Suffix drafting: the longest end of a request's tokens that occurred before, in itself or in what others of its
`cache_salt` said lately, and from there always the most frequent continuation.

The places that a suffix ends at are the node of a suffix tree that it leads to; going down the tree leaves those places
that continue with the chosen token. So no tree is built: a request's own tokens are searched with one pass of numpy,
and those of ended requests lie in a ring, where the places of each run of three tokens form a chain, the newest first.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from spillover.engine.speculation.drafter import NOTHING, Draft
from spillover.engine.speculation.ngram import longest_matches
from spillover.memory.kv.digest import root_digest

if TYPE_CHECKING:
    from spillover.engine.requests.request import Request
    from spillover.memory.tiers.token_log import TokenLog

LONGEST = 32  # tokens of a suffix that are compared
SHORTEST = 2  # in the request itself; in those that ended, a run of RUN tokens
RUN = 3
PLACES = 16  # that vote on the next token, the newest ones
SEEN = 64  # places of a chain that are looked at
LEAST_CHANCE = 0.05  # that all tokens up to the last one of a draft are right
CORPUS_TOKENS = 1 << 17  # kept of ended requests, over all salts
LAST_TOKENS = 2048  # of each: noting a token takes about a microsecond, while everybody waits
MOST_SALTS = 256
_END = -1  # between two requests


class SuffixDrafter:
    expected = None
    sequential = False

    def __init__(self, corpus_tokens: int = CORPUS_TOKENS, tokens: TokenLog | None = None) -> None:
        """Keep up to `corpus_tokens` of the requests that ended last, over all salts. `tokens`: a log to begin with and
        to add to; it knows salts by their digests only, and so does everything here."""
        self._capacity = corpus_tokens
        self._rings: OrderedDict[bytes, TokenRing] = OrderedDict()  # by salt, the latest used last
        self._log = tokens
        if tokens is not None:
            for salt, said in tokens.load():
                self._keep(salt, said)

    def propose(self, asked: Sequence[tuple[Request, int]]) -> list[Draft]:
        return [self._draft(request, most) for request, most in asked]

    def end(self, request: Request) -> None:
        """Keep the tokens for requests of the same salt."""
        salt, said = _digest(request.cache_salt), request.token_ids[-min(self._capacity - 1, LAST_TOKENS):]
        self._keep(salt, said)
        if self._log is not None:
            self._log.append(salt, said)

    def _keep(self, salt: bytes, said: Sequence[int]) -> None:
        ring = self._rings.get(salt)
        if ring is None:
            ring = self._rings[salt] = TokenRing()
        self._rings.move_to_end(salt)
        ring.add(said)
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
    """The tokens of requests that ended, the oldest of which are dropped; finds where a run of tokens occurs."""

    def __init__(self) -> None:
        self._tokens = array("i")
        self._before = array("q")  # of each token, where the run that it ends was before; -1: nowhere
        self._newest: dict[tuple[int, int, int], int] = {}  # run of tokens -> the place of its last token
        self._first = 0  # the place of the first token that is kept; places are never used again

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
        """Drop the oldest tokens, and an eighth more, so that this is rare."""
        count = min(len(self._tokens), count + len(self._tokens) // 8)
        del self._tokens[:count], self._before[:count]
        self._first += count
        self._newest = {run: place for run, place in self._newest.items() if place >= self._first + RUN - 1}

    def token(self, place: int) -> int:
        return self._tokens[place - self._first]

    def matches(self, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Return how many of the last tokens, up to LONGEST, occur here, and the places behind them, oldest first."""
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
    """Return how to read a request's own tokens, and past them its draft: a period goes on in itself."""
    count = len(tokens)
    return lambda place, draft: tokens[place] if place < count else draft[place - count]


def _descend(places: list[int], length: int, most: int, read: Callable[[int, list[int]], int]) -> Draft:
    """Follow the most frequent continuation, of equally frequent ones the newest."""
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
            sure = votes / (len(following) + 1 / length)  # a long match needs fewer witnesses
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
    """Return how many tokens of a draft are expected to be right."""
    total, chance = 0.0, 1.0
    for sure in draft.confidence:
        chance *= sure
        total += chance
    return total
