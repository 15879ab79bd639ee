"""A profile of a running engine: begun and ended by calls, and ended by itself before a trace grows too large."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from spillover.engine.profiling.profile import Recording, recorded
from spillover.errors import SpilloverError

MAX_STEPS = 100  # a step is about a thousand events, and the engine stands still while they are written


class ProfileSession:
    """The one profile that runs at a time, of the steps that `stepped` is told of."""

    def __init__(self, device: str, max_steps: int = MAX_STEPS) -> None:
        self._device = device
        self._max_steps = max_steps
        self._open: contextlib.AbstractContextManager[Recording] | None = None
        self._trace: Path | None = None  # trace of the profile that runs, or of one that ended by itself
        self._steps = 0

    def start(self, folder: str) -> None:
        """Profile from here on; the trace is written to `folder` at the end."""
        if self._open is not None:
            raise SpilloverError("a profile is running already; POST /stop_profile ends it")
        name = f"serve-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 1_000_000:06d}"
        profile = recorded(self._device, Path(folder) / f"{name}.json.gz", events=False)
        self._trace = profile.__enter__().trace
        self._open, self._steps = profile, 0

    def stepped(self, steps: int) -> None:
        """Count steps that ran since the last call; called between steps."""
        if self._open is not None:
            self._steps += steps
            if self._steps >= self._max_steps:
                self._end()

    def stop(self) -> dict[str, object]:
        """Return the trace's path, and the steps it holds."""
        self._end()
        trace, self._trace = self._trace, None
        if trace is None:
            raise SpilloverError("no profile is running; POST /start_profile begins one")
        return {"trace": str(trace), "steps": self._steps}

    def close(self) -> None:
        """Drop a profile that still runs, without a trace."""
        profile, self._open, self._trace = self._open, None, None
        if profile is not None:
            with contextlib.suppress(GeneratorExit):
                profile.__exit__(GeneratorExit, GeneratorExit(), None)

    def _end(self) -> None:
        profile, self._open = self._open, None
        if profile is not None:
            profile.__exit__(None, None, None)
