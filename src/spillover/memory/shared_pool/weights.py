"""Host weights shared by all engines of a machine: an engine's side of a pool's runs.

Runs are found by their content, and a found run is compared with the wanted bytes: replicas, ranks and a restarted
engine share memory exactly if their bytes are the same. If the pool has no room or does not answer, an engine keeps its
weights itself. If the owner dies nothing is lost, as the memory stays mapped in the engine.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
import uuid
from pathlib import Path

import xxhash

from spillover.kernels.huge_pages import POPULATE_WRITE, address_of, map_file
from spillover.memory.shared_pool import wire
from spillover.memory.shared_pool.client import Connection, PoolUnavailableError
from spillover.memory.transfer.host_pool import HostPool
from spillover.units import format_bytes

log = logging.getLogger("spillover.memory")

ANSWER_SECONDS = 5.0
BUSY_SECONDS = 30.0  # maximum wait in seconds for another engine that writes the same run
AGAIN_SECONDS = 0.005


class SharedWeights:
    """The runs that one engine uses, until `close`."""

    def __init__(self, path: Path, host: HostPool, seconds: float = ANSWER_SECONDS) -> None:
        """Connect with the first run. `host`: the host pool that pins them for the device."""
        self.nbytes = 0  # bytes of this engine's weights that are in the pool
        self.found_bytes = 0  # part of `nbytes` that the pool had already
        self._path = path
        self._host = host
        self._seconds = seconds
        self._engine = uuid.uuid4().hex
        self._connection: Connection | None = None
        self._gave_up = False

    def keep(self, content: memoryview) -> memoryview | None:
        """Return memory of the pool with exactly these bytes; None if the pool cannot store them."""
        if self._gave_up:
            return None
        try:
            memory = self._mapped(content)
        except (PoolUnavailableError, OSError) as error:
            self._give_up(str(error))
            return None
        if memory is None:
            self._give_up(f"no room for {format_bytes(content.nbytes)}")
            return None
        self.nbytes += memory.nbytes
        return memory

    def close(self) -> None:
        """Release all runs, so that the pool may drop them. They stay mapped as long as this engine uses them."""
        if self._connection is not None:
            self._connection.close()

    def _mapped(self, content: memoryview) -> memoryview | None:
        digest, give_up = xxhash.xxh3_128_digest(content), time.monotonic() + BUSY_SECONDS
        connection = self._connection = self._connection or Connection(self._path, self._seconds)
        while True:
            kept, fd = connection.keep(wire.Keep(wire.VERSION, digest, content.nbytes, self._engine),
                                       time.monotonic() + self._seconds)
            if fd is not None:
                break
            if kept.state == wire.FULL or time.monotonic() >= give_up:
                return None
            time.sleep(AGAIN_SECONDS)
        try:
            mapped = map_file(fd, content.nbytes)
        finally:
            os.close(fd)
        memory = memoryview(mapped)
        if kept.state == wire.NEW:
            mapped.madvise(POPULATE_WRITE, 0, content.nbytes)  # fails now if there is no memory, not at an access
            ctypes.memmove(address_of(memory), address_of(content), content.nbytes)
            connection.ask(wire.Written(digest, content.nbytes), wire.Count, time.monotonic() + self._seconds)
        elif _differs(memory, content):
            raise PoolUnavailableError("weights in the pool differ from the checkpoint's")
        else:
            self.found_bytes += content.nbytes
        if not self._host.adopt_pinned(memory):
            raise PoolUnavailableError("its memory could not be pinned; raise the limit of locked memory (ulimit -l)")
        return memory

    def _give_up(self, reason: str) -> None:
        self._gave_up = True
        log.warning("weights that are not on the device are kept in this engine's own memory, not in the shared pool "
                    "at %s: %s", self._path, reason)


def _differs(one: memoryview, other: memoryview) -> bool:
    memcmp = ctypes.CDLL(None).memcmp
    memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return bool(memcmp(address_of(one), address_of(other), one.nbytes))
