"""Checks of what a server leaves behind: blocks, processes, descriptors, shared memory, temporary files, memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
from server_process import ServerProcess, resident_nbytes

WARM = 0.2  # share of the run up to which memory and descriptors are the reference for later ones
MORE_MEMORY = (0.2, 64 << 20)  # allowed growth: a share of the reference, plus bytes
MORE_DESCRIPTORS = 8
SETTLE_SECONDS = 60


class Leaks:
    def __init__(self, server: ServerProcess, temporary: Path) -> None:
        self.memory: list[dict[str, float]] = []  # share of the run, MB of front and engine, front's descriptors
        self._server, self._temporary = server, temporary
        self._processes = len(server.children())
        self._pids = {server.pid}
        self._group = server.pid

    def sample_memory(self, share: float) -> None:
        children = self._server.children()
        self._pids |= {child.pid for child in children}
        engine = max((resident_nbytes(child) for child in children), default=0)
        front = psutil.Process(self._server.pid)
        self.memory.append({"share": round(share, 3), "front": resident_nbytes(front) / 1e6, "engine": engine / 1e6,
                            "descriptors": front.num_fds()})

    async def after_load(self, engine_alive: Callable[[], bool]) -> list[str]:
        """Return the leaks after all requests were answered; wait, as the engine notices a hang-up only in a step."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        values: dict[str, float] = {}
        children = 0
        for _ in range(SETTLE_SECONDS * 2):
            values = await asyncio.to_thread(self._metrics, names) if engine_alive() else {"engine": -1.0}
            children = len(self._server.children())
            if not any(values.values()) and children == self._processes:
                break
            await asyncio.sleep(0.5)
        problems = [f"afterwards {name} is {value}" for name, value in values.items() if value]
        if children != self._processes:
            problems.append(f"the server has {children} child processes and had {self._processes}")
        self.sample_memory(1.0)
        return problems + self._growth()

    def after_stop(self) -> list[str]:
        problems = []
        for process in psutil.process_iter(["pid"]):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getpgid(process.pid) == self._group or process.pid in self._pids:
                    problems.append(f"process {process.pid} is left: {' '.join(process.cmdline())[:100]}")
        left = sorted(str(path.relative_to(self._temporary)) for path in self._temporary.iterdir())
        if left:
            problems.append(f"temporary files are left: {left[:10]}")
        shared = [path.name for path in Path("/dev/shm").iterdir()
                  if any(re.search(rf"(?<!\d){pid}(?!\d)", path.name) for pid in self._pids)]
        if shared:
            problems.append(f"shared memory is left: {shared[:10]}")
        return problems

    def _growth(self) -> list[str]:
        warm = next((sample for sample in self.memory if sample["share"] >= WARM), self.memory[0])
        last = self.memory[-1]
        problems = []
        for name in ("front", "engine"):
            most = max(sample[name] for sample in self.memory if sample["share"] <= warm["share"])
            limit = most * (1 + MORE_MEMORY[0]) + MORE_MEMORY[1] / 1e6
            if last[name] > limit:
                problems.append(f"the {name} grew from {most:.0f} MB to {last[name]:.0f} MB (allowed: {limit:.0f} MB)")
        if last["descriptors"] > warm["descriptors"] + MORE_DESCRIPTORS:
            problems.append(f"the front had {warm['descriptors']:.0f} descriptors and has {last['descriptors']:.0f}")
        return problems

    def _metrics(self, names: tuple[str, ...]) -> dict[str, float]:
        try:
            with urllib.request.urlopen(f"{self._server.url}/metrics", timeout=10) as answer:
                text = answer.read().decode()
        except OSError:
            return {"metrics": -1.0}
        values = {}
        for name in names:
            samples = re.findall(rf"^spillover:{name}(\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
            if not samples:
                raise ValueError(f"/metrics has no {name}")
            # Lower tiers keep blocks that no request holds.
            values[name] = sum(float(value) for labels, value in samples
                               if 'tier="' not in labels or 'tier="device"' in labels)
        return values
