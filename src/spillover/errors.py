"""Errors meant for users: one clear sentence with the request, what is possible, and what to type instead.

Any other exception that reaches the user is a bug and shows a traceback.
"""

import difflib
from collections.abc import Iterable


class SpilloverError(Exception):
    """Bad input or an impossible request; its message is shown to the user as it is."""

    code: str | None = None  # machine-readable error code; None if there is none


class CheckpointError(SpilloverError):
    """A model folder or file that cannot be read; the message names the file and, if there is one, the tensor."""


class PlanError(SpilloverError):
    """A memory budget that is too small for the request; the message says what would fit and which flag to change."""


class RequestError(SpilloverError):
    """A request that cannot be served as it was sent (too long, a parameter out of range, a bad grammar)."""


class GrammarRefused(RequestError):  # noqa: N818
    """A structured output grammar that cannot be compiled, or not within the limits."""

    def __init__(self, message: str, reason: str) -> None:
        """Make the error. `reason`: one of GRAMMAR_REASONS."""
        super().__init__(message)
        self.reason = reason
        self.code = f"grammar_{reason}"


GRAMMAR_REASONS = ("size", "invalid", "time", "memory", "crash", "unavailable")


def did_you_mean(given: str, names: Iterable[str], listed: bool = False) -> str:
    """Return the end of an error message: "; did you mean 'lru'?". If no name is similar: the list of all names if
    `listed`, otherwise an empty string."""
    known = list(names)
    near = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean '{near[0]}'?" if near else f"; there are {', '.join(known)}" if listed else ""


class EngineDead(SpilloverError):  # noqa: N818
    """No engine can serve the request now (HTTP 503); `retry_after` is the number of seconds to wait before a retry."""

    def __init__(self, message: str, retry_after: int = 2) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(SpilloverError):  # noqa: N818
    """Too many requests are waiting (HTTP 429); `retry_after` is the number of seconds to wait before a retry."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def short_repr(value: object) -> str:
    """Return the repr of a value that was read from a file, shortened to 80 characters for error messages."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits, or too deep
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
