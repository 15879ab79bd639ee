"""Which replica a request goes to. A policy sees what is predicted for each and returns one; it has no clock and does
no I/O, so a simulator calls the same code, and another policy is one more class here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from spillover.cluster.predict import Prediction

NEAR_SHARE = 0.05  # of the best time: predictions are not better than this
NEAR_SECONDS = 0.001
STICKY_SHARE = 0.25  # a session stays where it was for this much more of the best time, ...
STICKY_SECONDS = 0.02  # ... or for this long
LOCALITY_SHARE = 0.3  # of a prompt that must be cached to count, as in SGLang's gateway
LOCALITY_REACH = 8  # requests more than the least busy that a replica with a longer prefix may have


class Candidate(NamedTuple):
    """A replica that may get the request."""

    replica: int
    prediction: Prediction
    in_flight: int  # requests that were sent there and have not ended
    sent_tokens: float  # prompt tokens ever computed there for this router
    device_use: float = 0.0
    session: bool = False  # the last request of this session went there


class Ask(NamedTuple):
    """What a policy may know of the request."""

    tokens: int
    busy: float = 0.0  # share of time that replicas compute prompts, 0 to 1


class Policy(Protocol):
    def choose(self, candidates: Sequence[Candidate], ask: Ask) -> Candidate:
        """Return one of the candidates, of which there is at least one."""
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, candidates: Sequence[Candidate], ask: Ask) -> Candidate:
        chosen = min(candidates, key=lambda each: (each.replica <= self._last, each.replica))
        self._last = chosen.replica
        return chosen


class LeastLoad:
    """The fewest requests under way."""

    def choose(self, candidates: Sequence[Candidate], ask: Ask) -> Candidate:
        return min(candidates, key=_load)


class LongestPrefix:
    """The longest cached prefix among those that are not much busier than the least busy one."""

    def choose(self, candidates: Sequence[Candidate], ask: Ask) -> Candidate:
        least = min(each.in_flight for each in candidates)
        reach = [each for each in candidates if each.in_flight <= least + LOCALITY_REACH]
        long = LOCALITY_SHARE * ask.tokens  # less would have all prompts with a common beginning go to one replica
        return min(reach, key=lambda each: (-each.prediction.cached_tokens if each.prediction.cached_tokens >= long
                                            else 0, *_load(each)))


class PredictedTime:
    """The least predicted time to the first token, and what that costs others, the more the busier they are."""

    def choose(self, candidates: Sequence[Candidate], ask: Ask) -> Candidate:
        times = [(_cost(each, ask.busy), each) for each in candidates]
        best = min(time for time, _ in times)
        stays = best + max(STICKY_SHARE * best, STICKY_SECONDS)
        for time, each in times:
            if each.session and time <= stays:
                return each
        near = best + max(NEAR_SHARE * best, NEAR_SECONDS)
        reach = [each for time, each in times if time <= near]
        # Among equals: where most of the prompt is, then where least has been done, so that all memory is used.
        share = 10 / max(ask.tokens, 1)
        return min(reach, key=lambda each: (-int(each.prediction.cached_tokens * share), *_load(each)))


POLICIES: dict[str, type[Policy]] = {"predicted": PredictedTime, "prefix": LongestPrefix, "least-load": LeastLoad,
                                     "round-robin": RoundRobin}


def _cost(candidate: Candidate, busy: float) -> float:
    prediction = candidate.prediction
    return prediction.first_token + busy * prediction.work + prediction.shared


def _load(candidate: Candidate) -> tuple[float, ...]:
    return candidate.in_flight, round(candidate.device_use, 1), candidate.sent_tokens, candidate.replica
