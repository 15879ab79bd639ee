"""Copies of weights to the device, started ahead of need and waited for when it comes.

A ticket stands for a copy; `wait` makes whatever computes next wait for it. `mark` is a point in the computing so far,
which a copy into the same place must let pass first.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

Source = Tensor | Callable[[], Tensor]  # what has to be read first is called on a thread that computes nothing


class Mover(Protocol):
    def start(self, target: Tensor, source: Source, after: Any) -> Any: ...

    def wait(self, ticket: Any) -> None: ...

    def mark(self) -> Any: ...

    def close(self) -> None: ...


class CpuMover:
    """In RAM, on a thread of its own. Computing is done when the call returns, so there is nothing to let pass."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "spillover-weights")

    def start(self, target: Tensor, source: Source, after: Any) -> Future[None]:
        return self._thread.submit(_copy, target, source)

    def wait(self, ticket: Future[None]) -> None:
        ticket.result()

    def mark(self) -> None:
        return None

    def close(self) -> None:
        self._thread.shutdown()


class CudaMover:
    """Over the link, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._reading = ThreadPoolExecutor(1, "spillover-weights")

    def start(self, target: Tensor, source: Source,
              after: torch.cuda.Event | None) -> torch.cuda.Event | Future[torch.cuda.Event]:
        if isinstance(source, Tensor):
            return self._copy(target, source, after)
        return self._reading.submit(lambda: self._copy(target, source(), after))

    @torch.inference_mode()
    def _copy(self, target: Tensor, run: Tensor, after: torch.cuda.Event | None) -> torch.cuda.Event:
        with torch.cuda.stream(self.stream):
            if after is not None:
                self.stream.wait_event(after)
            target.copy_(run, non_blocking=True)
            ticket: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ticket.record(self.stream)
        return ticket

    def wait(self, ticket: torch.cuda.Event | Future[torch.cuda.Event]) -> None:
        torch.cuda.current_stream().wait_event(ticket.result() if isinstance(ticket, Future) else ticket)

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def close(self) -> None:
        self._reading.shutdown()
        self.stream.synchronize()


@torch.inference_mode()
def _copy(target: Tensor, source: Source) -> None:
    target.copy_(source if isinstance(source, Tensor) else source())
