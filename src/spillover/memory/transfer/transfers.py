"""Copies between a device and host memory: what every client may ask of them, whatever the device."""

from __future__ import annotations

from typing import Any, Protocol

from spillover.memory.transfer.host_pool import HostPool
from spillover.memory.transfer.link_queue import LinkQueue, Priority


class Transfers(Protocol):
    """Copies of weights, started ahead of need and waited for when it comes; blocks of KV go by a DeviceLink.

    A ticket stands for a copy; `wait` makes whatever computes next wait for it. `mark` is a point in the computing so
    far, which a copy into the same place must let pass first.
    """

    @property
    def pool(self) -> HostPool: ...

    @property
    def queue(self) -> LinkQueue: ...

    def start(self, target: Any, source: Any, priority: Priority, after: Any = None) -> Any:
        """Copy one tensor into another; a source that has to be read first is a function, called on another thread."""

    def wait(self, ticket: Any) -> None: ...

    def mark(self) -> Any: ...

    def close(self) -> None:
        """End all copies and give host memory back, but for KV's, which a link releases."""
