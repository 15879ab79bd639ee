"""Simulated acceptance, for random weights, whose tokens cannot be predicted: drafts are made up, and the runner
accepts them at configured rates, by a hash of seed and position. Only the speed is meaningful, not the text or the
acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spillover.engine.speculation.drafters.drafter import Draft

if TYPE_CHECKING:
    from spillover.engine.requests.request import Request

_MASK = 2**64 - 1


class SimulatedDrafter:
    sequential = False

    def __init__(self, rates: Sequence[float], vocab_size: int) -> None:
        """Make the drafter. `rates[i]`: the share of drafts whose first i + 1 tokens are accepted."""
        self.expected: tuple[float, ...] | None = tuple(rates)
        self._vocab_size = vocab_size
        before = (1.0, *rates)
        self._confidence = tuple(min(1.0, max(1e-6, rate / (last or 1.0)))
                                 for last, rate in zip(before, rates, strict=False))

    def propose(self, requests: Sequence[tuple[Request, int]]) -> list[Draft]:
        return [self._draft(request, min(most, len(self._confidence))) for request, most in requests]

    def end(self, request: Request) -> None:
        """Do nothing: the drafter keeps no state of requests."""

    def _draft(self, request: Request, count: int) -> Draft:
        place = request.seed * 0x9E3779B97F4A7C15 + len(request.token_ids)
        tokens = tuple(mixed(place + index) % self._vocab_size for index in range(count))
        return Draft(tokens, self._confidence[:count])


def num_accepted(rates: Sequence[float], seed: int, position: int, drafted: int) -> int:
    """Return how many of the `drafted` tokens that follow the token at `position` count as accepted."""
    share = mixed((seed * 0xD1B54A32D192ED03 + position) ^ 0x5851F42D4C957F2D) / 2**64
    return sum(share < rate for rate in rates[:drafted])


def mixed(value: int) -> int:
    """Return a 64-bit hash of `value` (the finaliser of splitmix64)."""
    value &= _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
