"""Whether a tier's disk or server works: each change is logged once, with a limited rate."""

import logging
import time
from typing import Any

from spillover.memory.tiers.base import Ticket

log = logging.getLogger("spillover.memory")

QUIET_SECONDS = 60.0


class Health:
    """A record of whether a tier works, which warns when that changes. Only the tier's owner thread may call it."""

    def __init__(self, what: str) -> None:
        """Create it. `what`: the tier's name at the beginning of log lines, without passwords."""
        self._what = what
        self._warned = False
        self._last_warning = -QUIET_SECONDS
        self.error: str | None = None  # error of the latest work; None if it succeeded

    @property
    def ok(self) -> bool:
        return self.error is None

    def failed(self, error: str) -> None:
        now = time.monotonic()
        if self.error is None and now - self._last_warning >= QUIET_SECONDS:
            self._last_warning = now
            self._warned = True
            log.warning("%s: %s; continuing without it", self._what, error)
        self.error = error

    def succeeded(self) -> None:
        if self.error is not None and self._warned:
            self._warned = False
            log.warning("%s works again", self._what)
        self.error = None


def disk_error(ticket: Ticket[Any]) -> OSError | None:
    """Return the error that the disk reported; None for a deadline that passed in the queue, which has no errno."""
    return ticket.error if isinstance(ticket.error, OSError) and ticket.error.errno is not None else None
