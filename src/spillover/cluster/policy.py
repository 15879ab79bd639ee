"""Policies that choose the replica for a request. A policy gets a prediction per replica and returns one replica; it
has no clock and does no I/O, so a simulator runs the same code, and another policy is one more class here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from spillover.cluster.predict import Prediction

NEAR_SHARE = 0.05  # share of the best time below which differences are ignored: the accuracy of predictions
NEAR_SECONDS = 0.001
STICKY_SHARE = 0.25  # a session stays at its replica for up to this share more than the best time, ...
STICKY_SECONDS = 0.02  # ... or for up to these seconds more
LOCALITY_SHARE = 0.3  # share of a prompt that must be cached to count, as in SGLang's gateway
LOCALITY_REACH = 8  # requests beyond the least busy replica that one with a longer prefix may have


class Candidate(NamedTuple):
    """A replica that may get the request."""

    replica: int
    prediction: Prediction
    in_flight: int  # requests that were sent there and have not finished
    sent_tokens: float  # prompt tokens computed there so far for this router
    device_use: float = 0.0
    session: bool = False  # whether the previous request of the same conversation went there


class RequestFacts(NamedTuple):
    """The properties of the request that a policy may use."""

    tokens: int
    busy: float = 0.0  # share of time that replicas compute prompts, 0 to 1


class Policy(Protocol):
    def choose(self, candidates: Sequence[Candidate], request: RequestFacts) -> Candidate:
        """Return one of the candidates, of which there is at least one."""
        ...


class RoundRobin:
    """Chooses the replicas in turn."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, candidates: Sequence[Candidate], request: RequestFacts) -> Candidate:
        chosen = min(candidates, key=lambda each: (each.replica <= self._last, each.replica))
        self._last = chosen.replica
        return chosen


class LeastLoad:
    """Chooses the replica with the fewest requests in flight."""

    def choose(self, candidates: Sequence[Candidate], request: RequestFacts) -> Candidate:
        return min(candidates, key=_load)


class LongestPrefix:
    """Chooses the longest cached prefix among replicas that are not much busier than the least busy one."""

    def choose(self, candidates: Sequence[Candidate], request: RequestFacts) -> Candidate:
        least = min(each.in_flight for each in candidates)
        reach = [each for each in candidates if each.in_flight <= least + LOCALITY_REACH]
        long = LOCALITY_SHARE * request.tokens  # with less, all prompts with a common beginning would go to one replica
        return min(reach, key=lambda each: (-each.prediction.cached_tokens if each.prediction.cached_tokens >= long
                                            else 0, *_load(each)))


class PredictedTime:
    """Chooses the least predicted time to the first token plus its cost to others, weighted by how busy they are."""

    def choose(self, candidates: Sequence[Candidate], request: RequestFacts) -> Candidate:
        times = [(_cost(each, request.busy), each) for each in candidates]
        best = min(time for time, _ in times)
        stays = best + max(STICKY_SHARE * best, STICKY_SECONDS)
        for time, each in times:
            if each.session and time <= stays:
                return each
        near = best + max(NEAR_SHARE * best, NEAR_SECONDS)
        reach = [each for time, each in times if time <= near]
        # Among equals: most of the prompt cached, then least work done so far, so that all memory is used.
        share = 10 / max(request.tokens, 1)
        return min(reach, key=lambda each: (-int(each.prediction.cached_tokens * share), *_load(each)))


POLICIES: dict[str, type[Policy]] = {"predicted": PredictedTime, "prefix": LongestPrefix, "least-load": LeastLoad,
                                     "round-robin": RoundRobin}


def _cost(candidate: Candidate, busy: float) -> float:
    prediction = candidate.prediction
    return prediction.first_token + busy * prediction.work + prediction.shared


def _load(candidate: Candidate) -> tuple[float, ...]:
    return candidate.in_flight, round(candidate.device_use, 1), candidate.sent_tokens, candidate.replica
