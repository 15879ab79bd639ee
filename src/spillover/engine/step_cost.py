"""The simulated step time of a server without a model. Imports nothing heavy."""

from __future__ import annotations

from typing import NamedTuple

from spillover.errors import SpilloverError


class StepCost(NamedTuple):
    """The simulated time of a step: a fixed part, and a part per token."""

    seconds: float = 0.0
    token_seconds: float = 0.0

    @classmethod
    def of(cls, text: str | None) -> StepCost:
        """Parse the value of `--simulate-step`; SpilloverError if it is not two numbers of milliseconds."""
        if text is None:
            return cls()
        try:
            step, token = (float(part) / 1e3 for part in text.split(","))
        except ValueError:
            step = token = -1.0
        if not (0 <= step < 60 and 0 <= token < 1):
            raise SpilloverError("--simulate-step is two numbers of milliseconds, for a step and for each of its "
                                 f"tokens, such as 4,0.05; got '{text}'")
        return cls(step, token)
