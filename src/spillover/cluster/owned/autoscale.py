"""Autoscaling: the number of replicas for a fleet, from the predicted wait of the next request. No I/O, no clock: a
router passes the real time, a test or a simulator its simulated time.

Scales up when the predicted wait stays too long, and down when one replica fewer would have little to do for long
enough. Between the two nothing changes, so that a fleet does not grow and shrink in turns.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from spillover.cluster.fleet import Fleet
from spillover.cluster.predict import queue_seconds

UP_SECONDS = 2.0  # time that the wait must stay too long before scaling up, so that a short burst has no effect
SLACK_BACKLOG = 0.25  # scaling down: largest share of the wanted backlog that the fleet may have with one replica fewer
SLACK_BUSY = 0.6  # scaling down: largest share of time and of sequences in use with one replica fewer


@dataclass(frozen=True)
class ScaleSettings:
    least: int = 1
    most: int = 1
    backlog_seconds: float = 2.0  # predicted wait of a request above which replicas are added
    down_seconds: float = 120.0  # time that one replica fewer must suffice before one is removed

    def __post_init__(self) -> None:
        assert 1 <= self.least <= self.most
        assert self.backlog_seconds > 0
        assert self.down_seconds >= 0


class Observed(NamedTuple):
    """The state of a fleet at one moment."""

    replicas: int  # number of replicas that run or start
    ready: int  # number of these that accept requests
    starting: int  # number of these that have not served yet
    backlog_seconds: float = 0.0  # predicted wait of a request, summed over the ready replicas
    busy: float = 0.0  # share of time that the ready replicas compute prompts, 0 to 1
    occupied: float = 0.0  # requests of all replicas over the sequences that they can run; above 1 if requests wait


def observe(fleet: Fleet, now: float, wanted: Collection[int], starting: Collection[int] = ()) -> Observed:
    """Return a fleet's load. `wanted`: indices of the replicas that count, without those being removed."""
    ready = [replica for replica in fleet.replicas if replica.index in wanted and replica.usable(now)]
    loads = [replica.load(now) for replica in ready]
    sequences = sum(load.max_num_seqs for load in loads)
    return Observed(len(wanted), len(ready), len(starting), sum(queue_seconds(load) for load in loads),
                    fleet.busy(now), sum(load.open for load in loads) / sequences if sequences else 0.0)


class Autoscaler:
    """Decides the number of replicas from observations made at any interval."""

    def __init__(self, settings: ScaleSettings) -> None:
        self.settings = settings
        self._high_since: float | None = None
        self._low_since: float | None = None

    def decide(self, seen: Observed, now: float) -> int:
        settings, count = self.settings, seen.replicas
        if not settings.least <= count <= settings.most:
            return min(max(count, settings.least), settings.most)
        if seen.starting:  # the last decision has not taken effect yet
            self._high_since = self._low_since = None
            return count
        self._high_since = _since(self._high_since, now, seen.backlog_seconds > settings.backlog_seconds * count)
        self._low_since = _since(self._low_since, now, self._has_slack(seen))
        if self._high_since is not None and now - self._high_since >= UP_SECONDS and count < settings.most:
            self._high_since = None
            needed = math.ceil(seen.backlog_seconds / settings.backlog_seconds)
            return min(max(needed, count + 1), 2 * count, settings.most)
        if self._low_since is not None and now - self._low_since >= settings.down_seconds:
            self._low_since = None
            return count - 1
        return count

    def _has_slack(self, seen: Observed) -> bool:
        """Return whether the fleet would have little to do with one replica fewer."""
        rest = seen.replicas - 1
        if rest < self.settings.least or seen.ready < seen.replicas:
            return False
        more = seen.replicas / rest
        return (seen.backlog_seconds <= SLACK_BACKLOG * self.settings.backlog_seconds * rest
                and seen.busy * more <= SLACK_BUSY and seen.occupied * more <= SLACK_BUSY)


def _since(since: float | None, now: float, holds: bool) -> float | None:
    if not holds:
        return None
    return now if since is None else since
