"""Both ends of the engine's heartbeat, which distinguishes a long step from a process that hangs.

Twice per second a thread of the engine process writes into a pipe what the engine is doing and for how long. It also
runs during long steps, as native code and torch release the interpreter lock; a process that is stopped, swapped out or
deadlocked writes nothing. Imports only the standard library: the heartbeat starts before torch is loaded.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from dataclasses import dataclass

BEAT_SECONDS = 0.5
IMPORT_SECONDS = 300.0  # libraries may load from a cold disk for this long, in which the thread may not run
ACTIVITIES = ("importing libraries", "loading the model", "idle", "in a step", "in a call")
IMPORTING, LOADING, IDLE, STEP, CALL = range(len(ACTIVITIES))

_BEAT = struct.Struct("=Bqd")  # activity, number of steps so far, seconds in the activity
_LONGEST_TICK = 1.0  # a longer gap between two looks counts as this: the front was itself delayed or stopped


@dataclass(frozen=True)
class HangLimits:
    """Seconds after which an engine is considered hung."""

    degraded_seconds: float = 5.0  # seconds without a heartbeat until /health reports it and requests are refused
    hang_seconds: float = 30.0  # seconds without a heartbeat until the engine is killed and restarted
    step_seconds: float = 900.0  # seconds in one step or call, despite heartbeats, until the same happens


class Pulse:
    """The engine process's end: holds the current activity, and has a thread that writes it to the pipe."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._now = (IMPORTING, 0, time.monotonic())
        os.set_blocking(pipe, False)
        threading.Thread(target=self._beat, name="spillover-pulse", daemon=True).start()

    def at(self, activity: int, steps: int = 0) -> None:
        """Set the engine's current activity."""
        self._now = (activity, steps, time.monotonic())

    def _beat(self) -> None:
        while True:
            activity, steps, since = self._now
            with contextlib.suppress(BlockingIOError):  # the front is stopped and has not read for long
                try:
                    os.write(self._pipe, _BEAT.pack(activity, steps, time.monotonic() - since))
                except BrokenPipeError:
                    return
            time.sleep(BEAT_SECONDS)


class Heartbeat:
    """The front's end: the engine's last reported activity, and for how long the engine has been silent."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._polled_at = time.monotonic()
        self.silence = 0.0  # seconds without a heartbeat, counting only time in which the front was running
        self.activity = IMPORTING
        self.steps = 0
        self.seconds = 0.0  # seconds in the activity at the last heartbeat

    def poll(self) -> None:
        """Read the heartbeats since the last call; called several times per second."""
        if self._read_end < 0:
            return
        now = time.monotonic()
        self.silence += min(now - self._polled_at, _LONGEST_TICK)
        self._polled_at = now
        data = b""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._read_end, 65536):
                data += part
        if len(data) >= _BEAT.size:  # a pipe never splits writes this small
            self.activity, self.steps, self.seconds = _BEAT.unpack(data[len(data) - _BEAT.size:])
            self.silence = 0.0

    def hang(self, limits: HangLimits) -> str | None:
        """Return why the engine is considered hung and must be killed; None if it is not."""
        patience = max(limits.hang_seconds, IMPORT_SECONDS if self.activity == IMPORTING else 0.0)
        if self.silence > patience:
            return f"hung: it sent no heartbeat for {self.silence:.0f} s; in its last one it was {self.described}"
        if self.activity in (STEP, CALL) and self.seconds > limits.step_seconds:
            return f"hung: it was {self.described} for {self.seconds:.0f} s"
        return None

    @property
    def described(self) -> str:
        what = ACTIVITIES[self.activity]
        return f"{what} ({self.steps:,} done before it)" if self.activity == STEP else what

    def close_write_end(self) -> None:
        """Close the engine's end, once the engine process has inherited it."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def close(self) -> None:
        self.close_write_end()
        if self._read_end >= 0:
            os.close(self._read_end)
            self._read_end = -1
