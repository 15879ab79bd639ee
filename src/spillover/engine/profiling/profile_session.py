"""A profile of a running engine: started and stopped by calls, and stopped automatically before it grows too large."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from spillover.engine.profiling.profile import Recording, recorded
from spillover.errors import SpilloverError

MAX_STEPS = 100  # maximum steps of a profile: each has about a thousand events, and writing them stalls the engine


class ProfileSession:
    """Runs at most one profile at a time; `stepped` counts the steps that it covers."""

    def __init__(self, device: str, max_steps: int = MAX_STEPS) -> None:
        self._device = device
        self._max_steps = max_steps
        self._open: contextlib.AbstractContextManager[Recording] | None = None
        self._trace: Path | None = None  # trace of the running profile, or of one that stopped automatically
        self._steps = 0

    def start(self, folder: str) -> None:
        """Start a profile; its trace is written to `folder` when it stops."""
        if self._open is not None:
            raise SpilloverError("a profile is running already; POST /stop_profile ends it")
        name = f"serve-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 1_000_000:06d}"
        profile = recorded(self._device, Path(folder) / f"{name}.json.gz", events=False)
        self._trace = profile.__enter__().trace
        self._open, self._steps = profile, 0

    def stepped(self, steps: int) -> None:
        """Count the steps that ran since the last call; called between steps."""
        if self._open is not None:
            self._steps += steps
            if self._steps >= self._max_steps:
                self._end()

    def stop(self) -> dict[str, object]:
        """Stop the profile; return the path of its trace and the number of steps in it."""
        self._end()
        trace, self._trace = self._trace, None
        if trace is None:
            raise SpilloverError("no profile is running; POST /start_profile begins one")
        return {"trace": str(trace), "steps": self._steps}

    def close(self) -> None:
        """Abort a running profile without writing a trace."""
        profile, self._open, self._trace = self._open, None, None
        if profile is not None:
            with contextlib.suppress(GeneratorExit):
                profile.__exit__(GeneratorExit, GeneratorExit(), None)

    def _end(self) -> None:
        profile, self._open = self._open, None
        if profile is not None:
            profile.__exit__(None, None, None)
