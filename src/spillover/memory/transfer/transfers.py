"""The interface of copies between a device and host memory, for all devices."""

from __future__ import annotations

from typing import Any, Protocol

from spillover.memory.transfer.host_pool import HostPool
from spillover.memory.transfer.link_queue import LinkQueue, Priority


class Transfers(Protocol):
    """A copier of weights, which are copied before they are needed; KV blocks are copied by a DeviceLink.

    A ticket represents a copy; `wait` makes the next kernels wait for it. `record_event` returns a point after
    all kernels so far, which a copy into memory that they use must wait for.
    """

    @property
    def pool(self) -> HostPool: ...

    @property
    def queue(self) -> LinkQueue: ...

    def start(self, target: Any, source: Any, priority: Priority, after: Any = None) -> Any:
        """Start copying one tensor into another; `source` may be a function that reads it, called on another thread."""

    def wait(self, ticket: Any) -> None: ...

    def record_event(self) -> Any: ...

    def close(self) -> None:
        """Complete all copies and free host memory, except for that of KV, which a link releases."""
