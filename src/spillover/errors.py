"""Errors meant for a person: one clear sentence that says what was asked, what is possible and what to type.

Anything else that escapes is a bug and shows a traceback.
"""

import difflib
from collections.abc import Iterable


class SpilloverError(Exception):
    """Bad input or an impossible request; its text is the whole answer."""

    code: str | None = None  # for programs, where there is one


class CheckpointError(SpilloverError):
    """A model folder or file that cannot be read; names the file and, where there is one, the tensor."""


class PlanError(SpilloverError):
    """A memory budget that cannot hold what was asked of it; says what would fit and which flag to change."""


class RequestError(SpilloverError):
    """A request that cannot be served as asked (too long, a parameter out of range, a bad grammar)."""


class GrammarRefused(RequestError):  # noqa: N818
    """Structured output that cannot be compiled, or not within the limits."""

    def __init__(self, message: str, reason: str) -> None:
        """Refuse a grammar. `reason`: one of GRAMMAR_REASONS."""
        super().__init__(message)
        self.reason = reason
        self.code = f"grammar_{reason}"


GRAMMAR_REASONS = ("size", "invalid", "time", "memory", "crash", "unavailable")


def did_you_mean(given: str, names: Iterable[str], listed: bool = False) -> str:
    """Return the end of a refusal: "; did you mean 'lru'?". Where no name is near, all of them if `listed`, or
    nothing."""
    known = list(names)
    near = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean '{near[0]}'?" if near else f"; there are {', '.join(known)}" if listed else ""


class EngineDead(SpilloverError):  # noqa: N818
    """There is no engine to serve this now (HTTP 503); `retry_after` seconds is when to try again."""

    def __init__(self, message: str, retry_after: int = 2) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(SpilloverError):  # noqa: N818
    """Too many requests wait already (HTTP 429); `retry_after` seconds is when to try again."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def shown(value: object) -> str:
    """Return a value out of a file, short enough for a sentence."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits, or too deep
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
