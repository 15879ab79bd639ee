"""The timeout of a program, and its cancellation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spillover.errors import SpilloverError


class ProgramError(SpilloverError):
    """A program that cannot continue; `branch` is the branch that failed."""

    def __init__(self, message: str, branch: str | None = None) -> None:
        super().__init__(message if branch is None else f"branch '{branch}': {message}")
        self.branch = branch


class ProgramCancelled(ProgramError):  # noqa: N818
    """A program that was cancelled."""


class Lifetime:
    """The timeout of a run, and its cancellation. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._cancelled = False
        self._closers: dict[object, Callable[[], object]] = {}

    @property
    def over(self) -> bool:
        return self._cancelled or time.monotonic() >= self._until

    def remaining(self) -> float:
        """Return the seconds left, more than 0; raise ProgramError if the run is cancelled or has timed out."""
        left = self._until - time.monotonic()
        if self._cancelled:
            raise ProgramCancelled("the program was cancelled")
        if left <= 0:
            raise ProgramError(f"the program did not end within {self.seconds:g} s; give more with timeout=")
        return left

    def cancel(self) -> None:
        """Cancel everything in progress; a second call does nothing."""
        with self._lock:
            self._cancelled = True
            closers, self._closers = list(self._closers.values()), {}
        for close in closers:
            close()

    @contextmanager
    def closing(self, close: Callable[[], object]) -> Iterator[None]:
        """Call `close`, from another thread, if the run is cancelled while the context is active."""
        self.remaining()
        key = object()
        with self._lock:
            self._closers[key] = close
        try:
            self.remaining()  # raises if it was cancelled before the closer was registered
            yield
        finally:
            with self._lock:
                self._closers.pop(key, None)
