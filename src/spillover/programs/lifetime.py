"""How long a program may run, and how it ends before its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spillover.errors import SpilloverError


class ProgramError(SpilloverError):
    """A program that cannot go on; `branch` is where."""

    def __init__(self, message: str, branch: str | None = None) -> None:
        super().__init__(message if branch is None else f"branch '{branch}': {message}")
        self.branch = branch


class ProgramCancelled(ProgramError):  # noqa: N818
    """The program was given up before its end."""


class Lifetime:
    """How long a run may take, and its end by others. Safe from every thread."""

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
        """Return the seconds left, more than 0; raises where there are none."""
        left = self._until - time.monotonic()
        if self._cancelled:
            raise ProgramCancelled("the program was cancelled")
        if left <= 0:
            raise ProgramError(f"the program did not end within {self.seconds:g} s; give more with timeout=")
        return left

    def cancel(self) -> None:
        """End all that is under way; a second call does nothing."""
        with self._lock:
            self._cancelled = True
            closers, self._closers = list(self._closers.values()), {}
        for close in closers:
            close()

    @contextmanager
    def closing(self, close: Callable[[], object]) -> Iterator[None]:
        """Call `close`, from another thread, if the run is cancelled meanwhile."""
        self.remaining()
        key = object()
        with self._lock:
            self._closers[key] = close
        try:
            self.remaining()  # cancelled before the closer was there
            yield
        finally:
            with self._lock:
                self._closers.pop(key, None)
