"""The times at which requests are sent, relative to the start of a run, all drawn before it begins.

At a given rate the gaps are drawn from a gamma distribution and then scaled so that the last request is exactly at
`count / rate`. A Poisson process with a known count is just that (arrivals are uniform over the time), so it stays as
random, and two seeds offer the same load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from spillover.errors import SpilloverError

RampUp = Literal["linear", "exponential"]


@dataclass(frozen=True)
class Arrivals:
    """Open loop at a rate or at a trace's times; closed loop if the rate is infinite and `max_concurrency` is set.

    With both, requests arrive in open loop and wait in the client while `max_concurrency` are in flight. With
    `static_batch_size` n, n requests are sent together, and the next n once all of these have finished.
    """

    rate: float = math.inf  # requests per second
    burstiness: float = 1.0  # shape of the gamma distribution: 1 Poisson, below burstier, above smoother, inf constant
    max_concurrency: int | None = None
    static_batch_size: int | None = None
    ramp_up: RampUp | None = None
    ramp_up_start: float = 0.0
    ramp_up_end: float = 0.0
    self_timed: bool = True  # whether to keep a trace's own times, unless a rate is given
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise SpilloverError("--request-rate is requests per second above 0, or inf for all at once; got "
                                 f"{self.rate}")
        if not self.burstiness > 0:
            raise SpilloverError("--burstiness is above 0: 1 for Poisson, less for bursts, inf for even gaps; got "
                                 f"{self.burstiness}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise SpilloverError(f"--max-concurrency must be at least 1; got {self.max_concurrency}")
        if self.static_batch_size is not None:
            if self.static_batch_size < 1:
                raise SpilloverError(f"--static-batch-size must be at least 1; got {self.static_batch_size}")
            if not math.isinf(self.rate) or self.max_concurrency is not None or self.ramp_up is not None:
                raise SpilloverError("--static-batch-size determines when requests are sent: leave --request-rate, "
                                     "--max-concurrency and --ramp-up-strategy out")
        if self.ramp_up is not None:
            if not math.isinf(self.rate):
                raise SpilloverError("--ramp-up-strategy determines the rate: leave --request-rate out")
            if not 0 < self.ramp_up_start <= self.ramp_up_end:
                raise SpilloverError("--ramp-up-strategy needs 0 < --ramp-up-start-rps <= --ramp-up-end-rps; got "
                                     f"{self.ramp_up_start:g} and {self.ramp_up_end:g}")

    def replays(self, times: Sequence[float | None]) -> bool:
        """Return whether the workload's own times are kept."""
        return (self.self_timed and math.isinf(self.rate) and self.ramp_up is None and self.static_batch_size is None
                and any(at is not None for at in times))

    def is_closed(self, times: Sequence[float | None]) -> bool:
        """Return whether requests are sent when others finish, rather than at given times."""
        return self.static_batch_size is not None or (
            self.max_concurrency is not None and math.isinf(self.rate) and self.ramp_up is None
            and not self.replays(times))

    def times(self, own: Sequence[float | None]) -> list[float]:
        """Return each request's time in seconds after the start, given the times that the workload specifies."""
        count = len(own)
        if self.replays(own):
            return [at or 0.0 for at in own]
        if self.ramp_up is None and math.isinf(self.rate):
            return [0.0] * count
        rates = self._rates(count)
        if math.isinf(self.burstiness):
            gaps = 1 / rates
        else:
            gaps = np.random.default_rng(self.seed).gamma(self.burstiness, 1 / (rates * self.burstiness))
        times = np.cumsum(gaps)
        if self.ramp_up is None:
            times *= count / self.rate / times[-1]
        result: list[float] = times.tolist()
        return result

    def describe(self, own: Sequence[float | None]) -> dict[str, Any]:
        """Return the arrivals for a result's details; infinity is a string, as JSON has none."""
        kind = ("trace" if self.replays(own) else "ramp-up" if self.ramp_up is not None
                else "static batches" if self.static_batch_size is not None
                else "closed" if self.is_closed(own) else "burst" if math.isinf(self.rate)
                else "constant" if math.isinf(self.burstiness) else "poisson" if self.burstiness == 1 else "gamma")
        asked = {"arrival": kind, "request_rate": _number(self.rate), "burstiness": _number(self.burstiness),
                 "max_concurrency": self.max_concurrency}
        if self.static_batch_size is not None:
            asked["static_batch_size"] = self.static_batch_size
        if self.ramp_up is not None:
            asked |= {"ramp_up_strategy": self.ramp_up, "ramp_up_start_rps": self.ramp_up_start,
                      "ramp_up_end_rps": self.ramp_up_end}
        return asked

    def _rates(self, count: int) -> Any:
        progress = np.arange(count) / max(count - 1, 1)
        if self.ramp_up == "linear":
            return self.ramp_up_start + (self.ramp_up_end - self.ramp_up_start) * progress
        if self.ramp_up == "exponential":
            return self.ramp_up_start * (self.ramp_up_end / self.ramp_up_start) ** progress
        return np.full(count, self.rate)


def _number(value: float) -> float | str:
    return "inf" if math.isinf(value) else value
