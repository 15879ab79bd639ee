"""The engine's heartbeat, both ends of it: what tells a long step from a process that hangs.

A thread of the engine process writes into a pipe, twice per second, what the engine is doing and for how long. It runs
during long steps too, since native code and torch let go of the interpreter; a process that is stopped, swapped out or
deadlocked writes nothing. Nothing but the standard library is imported here: the heart beats before torch is loaded.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from dataclasses import dataclass

BEAT_SECONDS = 0.5
IMPORT_SECONDS = 300.0  # libraries are loaded from a cold disk without letting the thread run
ACTIVITIES = ("importing libraries", "loading the model", "idle", "in a step", "in a call")
IMPORTING, LOADING, IDLE, STEP, CALL = range(len(ACTIVITIES))

_BEAT = struct.Struct("=Bqd")  # activity, steps so far, seconds in the activity
_LONGEST_TICK = 1.0  # a later look counts as this: the front itself was held up or stopped


@dataclass(frozen=True)
class HangLimits:
    """Seconds after which an engine is taken for hung."""

    degraded_seconds: float = 5.0  # without a heartbeat: /health says so, and no request is taken
    hang_seconds: float = 30.0  # without a heartbeat: killed, and started again
    step_seconds: float = 900.0  # in one step or call, though the heart beats: likewise


class Pulse:
    """The engine process's heartbeat: says what it does, and has a thread that passes it on."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._now = (IMPORTING, 0, time.monotonic())
        os.set_blocking(pipe, False)
        threading.Thread(target=self._beat, name="spillover-pulse", daemon=True).start()

    def at(self, activity: int, steps: int = 0) -> None:
        """Say what the engine does from now on."""
        self._now = (activity, steps, time.monotonic())

    def _beat(self) -> None:
        while True:
            activity, steps, since = self._now
            with contextlib.suppress(BlockingIOError):  # a front that is stopped has not read for long
                try:
                    os.write(self._pipe, _BEAT.pack(activity, steps, time.monotonic() - since))
                except BrokenPipeError:
                    return
            time.sleep(BEAT_SECONDS)


class Heartbeat:
    """The front's side of it: what was last heard of an engine, and for how long it has been silent."""

    def __init__(self) -> None:
        self._ours, self.theirs = os.pipe()
        os.set_blocking(self._ours, False)
        self._looked = time.monotonic()
        self.silence = 0.0  # seconds without a heartbeat, of those that the front itself was awake
        self.activity = IMPORTING
        self.steps = 0
        self.seconds = 0.0  # in the activity, when last heard

    def look(self) -> None:
        """Take in the heartbeats since the last look; called several times per second."""
        if self._ours < 0:
            return
        now = time.monotonic()
        self.silence += min(now - self._looked, _LONGEST_TICK)
        self._looked = now
        data = b""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._ours, 65536):
                data += part
        if len(data) >= _BEAT.size:  # a pipe never splits writes as small as these
            self.activity, self.steps, self.seconds = _BEAT.unpack(data[len(data) - _BEAT.size:])
            self.silence = 0.0

    def hang(self, limits: HangLimits) -> str | None:
        """Return why the engine is taken for hung for good, if it is."""
        patience = max(limits.hang_seconds, IMPORT_SECONDS if self.activity == IMPORTING else 0.0)
        if self.silence > patience:
            return f"hung: it gave no sign of life for {self.silence:.0f} s, last heard {self.described}"
        if self.activity in (STEP, CALL) and self.seconds > limits.step_seconds:
            return f"hung: it was {self.described} for {self.seconds:.0f} s"
        return None

    @property
    def described(self) -> str:
        what = ACTIVITIES[self.activity]
        return f"{what} ({self.steps:,} done before it)" if self.activity == STEP else what

    def close_theirs(self) -> None:
        """Close their end, once the engine process has inherited it."""
        if self.theirs >= 0:
            os.close(self.theirs)
            self.theirs = -1

    def close(self) -> None:
        self.close_theirs()
        if self._ours >= 0:
            os.close(self._ours)
            self._ours = -1
