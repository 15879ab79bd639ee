"""The part of the module `ray` that the package uses, in the test's own event loop: actors are local objects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    pass


class FakeRay:
    """A cluster with `cpus` free CPUs; an actor that needs more waits indefinitely."""

    def __init__(self, cpus: float = 2.0) -> None:
        self.cpus = cpus
        self.address = "10.0.0.7"  # address of the calling machine
        self.placed: list[dict[str, Any]] = []  # options of every actor ever created
        self.actors: list[FakeHandle] = []  # live actors
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.util = SimpleNamespace(get_node_ip_address=lambda: self.address)

        self.refuses = 0  # number of connections still to be refused

    def init(self, **options: Any) -> None:
        self.refuses -= 1
        if self.refuses >= 0:
            raise ConnectionError("no node info\nMore lines.")

    def remote(self, actor_class: Callable[[], Any]) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(
            remote=lambda: FakeHandle(self, actor_class, options)))

    def available_resources(self) -> dict[str, float]:
        return {"CPU": self.cpus}

    def kill(self, handle: FakeHandle) -> None:
        """Kill an actor as SIGKILL does: everything that waits for it fails."""
        handle.lost.set()
        if handle in self.actors:
            self.actors.remove(handle)
            self.cpus += handle.options["num_cpus"]


class FakeHandle:
    def __init__(self, ray: FakeRay, actor_class: Callable[[], Any], options: dict[str, Any]) -> None:
        self.options = options
        self.lost = asyncio.Event()
        self.object: Any = None
        ray.placed.append(options)
        if options["num_cpus"] <= ray.cpus:
            ray.cpus -= options["num_cpus"]
            self.object = actor_class()
            ray.actors.append(self)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *given: self._call(name, given))

    async def _call(self, name: str, given: tuple[Any, ...]) -> Any:
        lost = asyncio.ensure_future(self.lost.wait())
        waits = [lost]
        if self.object is not None:
            waits.append(asyncio.ensure_future(getattr(self.object, name)(*given)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                raise RayError("The actor died unexpectedly before finishing this task.\nMore lines.")
            return waits[1].result()
        finally:
            for each in waits:
                each.cancel()
