"""Scales the replicas with the load: starts more, and drains those that are to be removed."""

from __future__ import annotations

import asyncio
import logging

from spillover.cluster.fleet import Fleet
from spillover.cluster.owned.autoscale import Autoscaler, ScaleSettings, observe
from spillover.cluster.owned.replicas import OwnedReplicas
from spillover.cluster.watch import clock

log = logging.getLogger("spillover.router")

CHECK_SECONDS = 0.5  # between two checks of the load
DRAINED_SECONDS = 0.1  # between two checks of a draining replica
AGAIN_SECONDS = 30.0  # wait before the next attempt after a replica could not be started


class Scaling:
    def __init__(self, fleet: Fleet, replicas: OwnedReplicas, settings: ScaleSettings, drain_seconds: float) -> None:
        self.target = 0  # target number of replicas of the last decision
        self._fleet = fleet
        self._replicas = replicas
        self._autoscaler = Autoscaler(settings)
        self._drain_seconds = drain_seconds
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._ending: set[int] = set()  # those of `_leaving` whose server is being stopped
        self._starting: set[int] = set()  # replicas that were starting at the last check
        self._not_before = 0.0  # earliest time of the next start

    async def run(self) -> None:
        try:
            while True:
                self.check(clock())
                await asyncio.sleep(CHECK_SECONDS)
        finally:
            for task in self._leaving.values():
                task.cancel()
            await asyncio.gather(*self._leaving.values(), return_exceptions=True)

    def check(self, now: float) -> None:
        """Decide once, and begin to start or remove replicas accordingly."""
        replicas = self._replicas
        stay = [index for index in replicas.wanted if index not in self._leaving]
        if any(index not in replicas.wanted for index in self._starting):
            self._not_before = now + AGAIN_SECONDS
        self._starting = set(replicas.starting)
        self.target = self._autoscaler.decide(observe(self._fleet, now, stay, self._starting), now)
        for _ in range(self.target - len(stay)):
            if (back := next((index for index in self._leaving if index not in self._ending), None)) is not None:
                self._return(back)  # the quickest way to scale up is to keep a leaving replica
            elif now >= self._not_before:
                self._grow()
        for _ in range(len(stay) - self.target):
            index = min(stay, key=lambda each: (len(self._fleet.replicas[each].flights), -each))
            stay.remove(index)
            log.info("draining %s, to stop it: one replica fewer is enough for the load",
                     self._fleet.replicas[index].name)
            self._leaving[index] = asyncio.create_task(self._leave(index))

    def _grow(self) -> None:
        index = self._replicas.add()
        if index is not None:
            self._starting.add(index)
            log.info("starting %s: requests are predicted to wait for too long", self._fleet.replicas[index].name)

    def _return(self, index: int) -> None:
        self._leaving.pop(index).cancel()
        self._fleet.replicas[index].draining = False
        log.info("keeping %s, which was to be stopped: the load needs it again", self._fleet.replicas[index].name)

    async def _leave(self, index: int) -> None:
        """Keep new requests away, wait for running ones, and stop the server."""
        replica = self._fleet.replicas[index]
        replica.draining = True
        deadline = clock() + self._drain_seconds
        while replica.flights and clock() < deadline:
            await asyncio.sleep(DRAINED_SECONDS)
        self._ending.add(index)
        await self._replicas.remove(index)
        replica.draining = False
        self._ending.remove(index)
        del self._leaving[index]
