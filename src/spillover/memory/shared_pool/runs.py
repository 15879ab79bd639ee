"""The bookkeeping of weights in a shared pool: runs of bytes that engines share, found by their content.

A run is a separate file in memory. Slabs that no block has used yet are removed from the pool for it: slabs that blocks
have used may be pinned by an engine, and cannot be returned to the system. A run without users stays, for an engine
that is restarted, until its room is needed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from spillover.memory.shared_pool.index import PoolIndex

Name = tuple[bytes, int]  # digest of the bytes, and their number


@dataclass(eq=False)
class Run:
    name: Name
    fd: int
    slabs: int  # number of slabs that were removed from the pool for it
    written: bool = False
    users: set[object] = field(default_factory=set)  # connections that use it; the first of them writes it
    last_use: float = field(default_factory=time.monotonic)


class PoolRuns:
    def __init__(self, index: PoolIndex, make: Callable[[int], int]) -> None:
        """Start without runs. `make`: creates a file of n bytes and returns its descriptor; OSError if it cannot."""
        self._index = index
        self._make = make
        self._runs: dict[Name, Run] = {}

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    @property
    def nbytes(self) -> int:
        return sum(run.name[1] for run in self)

    def acquire(self, user: object, name: Name) -> Run | None:
        """Return the run and add the user, who has to write it if it is new; None if there is no room for it."""
        run = self._runs.get(name)
        if run is None:
            run = self._new(name)
            if run is None:
                return None
        elif not run.written and user not in run.users:
            return run  # another user writes it: this one is not added and has to retry
        run.users.add(user)
        run.last_use = time.monotonic()
        return run

    def written(self, user: object, name: Name) -> bool:
        """Mark a run that the user has written as complete, so that others can use it."""
        run = self._runs.get(name)
        if run is None or run.written or user not in run.users:
            return False
        run.written = True
        return True

    def release(self, user: object) -> None:
        """Remove the user from all runs; drop those that it has not written completely."""
        for run in list(self):
            if user in run.users:
                run.users.remove(user)
                run.last_use = time.monotonic()
                if not run.written:
                    self._drop(run)

    def free_slabs(self, slabs: int) -> bool:
        """Drop runs without users, least recently used first, until there are n slabs that no block has used; return
        whether there are."""
        idle = sorted((run for run in self if not run.users), key=lambda run: run.last_use)
        while self._index.unused < slabs and idle:
            self._drop(idle.pop(0))
        return self._index.unused >= slabs

    def close(self) -> None:
        for run in list(self):
            self._drop(run)

    def _new(self, name: Name) -> Run | None:
        slabs = -(-name[1] // self._index.slab_bytes)
        if not self.free_slabs(slabs):
            return None
        try:
            fd = self._make(name[1])
        except OSError:
            return None
        self._index.lend(slabs)
        run = self._runs[name] = Run(name, fd, slabs)
        return run

    def _drop(self, run: Run) -> None:
        del self._runs[run.name]
        self._index.return_slabs(run.slabs)
        with contextlib.suppress(OSError):
            os.close(run.fd)
