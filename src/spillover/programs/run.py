"""One run of a program: the threads of its branches, its timeout, its errors, and the chunks it streams."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from spillover.programs.backend import Backend
from spillover.programs.context import Context
from spillover.programs.lifetime import Lifetime, ProgramError
from spillover.programs.state import State

LEAVE_SECONDS = 30.0  # timeout for the requests of a cancelled run to finish


@dataclass(frozen=True)
class Chunk:
    """A piece of a branch's text; `name` is that of its gen, None for fixed text or a gen without a name."""

    branch: str
    name: str | None
    text: str


class Run:
    def __init__(self, backend: Backend, lifetime: Lifetime, defaults: Mapping[str, Any], prefills: bool = True,
                 chunks: queue.SimpleQueue[Chunk | None] | None = None) -> None:
        """Begin a run. `defaults`: options of every gen; `prefills`: fixed text ahead; `chunks`: gets the text."""
        self.backend = backend
        self.lifetime = lifetime
        self.defaults = dict(defaults)
        self.prefills = prefills
        self.ended = False
        self.main = State(self, "main", Context(backend))
        self._chunks = chunks
        self._states = [self.main]
        self._seen_errors: list[ProgramError] = []
        self._threads = 0
        self._idle = threading.Condition()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        """Cancel everything in progress, and wait until it has ended."""
        self.ended = True
        until = time.monotonic() + LEAVE_SECONDS
        with self._idle:
            busy = self._threads
        if busy:
            self.lifetime.cancel()
        with self._idle:
            while self._threads and time.monotonic() < until:
                self._idle.wait(until - time.monotonic())
            if self._threads and kind is None:
                raise ProgramError(f"{self._threads} branches have not ended within {LEAVE_SECONDS:g} s")

    def finish(self) -> None:
        """Wait for all branches; raise the first error that the program has not seen."""
        seen = list(self._seen_errors)
        for state in self._states:
            try:
                state.sync()
            except ProgramError as error:
                if not any(error is one for one in seen):
                    raise

    def check_open(self) -> None:
        if self.ended:
            raise ProgramError("the program has ended; nothing can be added to its state")
        self.lifetime.remaining()

    def register(self, state: State) -> None:
        self._states.append(state)

    def seen(self, error: ProgramError) -> None:
        """Record that the program has seen this error."""
        self._seen_errors.append(error)

    def emit(self, branch: str, name: str | None, text: str) -> None:
        if self._chunks is not None and text:
            self._chunks.put(Chunk(branch, name, text))

    def start(self, work: Callable[[], None]) -> None:
        """Run a branch's work in a thread that this run waits for when it ends."""

        def body() -> None:
            try:
                work()
            finally:
                with self._idle:
                    self._threads -= 1
                    self._idle.notify_all()

        with self._idle:
            self._threads += 1
        try:
            threading.Thread(target=body, name="spillover-program", daemon=True).start()
        except BaseException:
            with self._idle:
                self._threads -= 1
            raise

    @contextmanager
    def passing(self, ids: list[int] | None, usable: int | None = None) -> Iterator[Callable[[], None]]:
        """Wait for a request that computes the same prefix; see PrefixGate."""
        if ids is None:
            yield lambda: None
            return
        with self.backend.gate.passing(ids, self.lifetime, usable) as computed:
            yield computed
