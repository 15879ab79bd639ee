"""The faults of chaos.py: in the engine, Redis, the disk and clients. One at a time, drawn from a seed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Protocol

import psutil
import redis as redis_client
from server_process import ServerProcess, free_port

from spillover.cli.bench.redis_server import find_server

HOLD_SECONDS = (1.0, 5.0)  # range of a fault's duration
BURST = 64
START_SECONDS = 30
REDIS_BYTES = 400 << 20


class Clients(Protocol):
    async def burst(self, count: int) -> None: ...

    async def disconnect(self, count: int) -> None: ...


class Redis:
    """A private Redis server that can be killed, stopped, emptied and filled."""

    def __init__(self, folder: Path) -> None:
        program = find_server()
        if program is None:
            raise SystemExit("chaos needs a Valkey or Redis server: install the Debian package valkey-server or "
                             "redis-server")
        self._program, self._folder = program, folder
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis://127.0.0.1:{self._port}/0"

    def start(self) -> None:
        self._process = subprocess.Popen(
            [self._program, "--port", str(self._port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
             "--dir", str(self._folder), "--maxmemory", str(REDIS_BYTES), "--maxmemory-policy", "allkeys-lru"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.client().ping()
                return
            except redis_client.RedisError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def client(self) -> redis_client.Redis:
        return redis_client.Redis(port=self._port, socket_timeout=10)

    def configure(self, **settings: str) -> None:
        for name, value in settings.items():
            self.client().config_set(name.replace("_", "-"), value)

    def __enter__(self) -> Redis:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop()


class SmallDisk:
    """A small file system that can be filled, if one can be mounted; otherwise a plain folder that is never filled."""

    def __init__(self, path: Path, size: str) -> None:
        self.path = path
        self._size = size
        self.small = False

    def __enter__(self) -> SmallDisk:
        self.path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={self._size}", "tmpfs", str(self.path)]
        self.small = shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0
        if not self.small:
            print("no file system can be mounted here, so the disk is not filled", file=sys.stderr)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self.small:
            subprocess.run(["umount", "-l", str(self.path)], check=False)

    def segments(self) -> list[Path]:
        return sorted(self.path.glob("kv/*/*.kv"))

    def fill(self) -> None:
        with contextlib.suppress(OSError), (self.path / "filler").open("wb") as file:
            while True:
                file.write(bytes(1 << 20))

    def empty(self) -> None:
        (self.path / "filler").unlink(missing_ok=True)


class Faults:
    def __init__(self, server: ServerProcess, redis: Redis, disk: SmallDisk, clients: Clients, rng: random.Random,
                 pause: float, only: list[str] | None = None) -> None:
        self.made: Counter[str] = Counter()
        self.impossible: set[str] = set()
        self.now = ""
        self._server, self._redis, self._disk, self._clients = server, redis, disk, clients
        self._rng, self._pause = rng, pause
        self._faults = {name.removeprefix("do_"): getattr(self, name) for name in dir(self) if name.startswith("do_")}
        if not disk.small:
            self.impossible.add("disk_full")
            del self._faults["disk_full"]
        if only is not None:
            self._faults = {name: self._faults[name] for name in only}

    async def run(self, until: float) -> None:
        """Make every fault in turn, in a new order in each round."""
        while True:
            for name in self._rng.sample(sorted(self._faults), len(self._faults)):
                self.now = "no fault"
                await asyncio.sleep(self._rng.uniform(0.5, 1.5) * self._pause)
                if time.monotonic() >= until:
                    return
                self.now = name
                await self._faults[name]()
                self.made[name] += 1

    def engine_alive(self) -> bool:
        return self._server.status() == 200

    async def _hold(self) -> None:
        await asyncio.sleep(self._rng.uniform(*HOLD_SECONDS))

    def _engine(self) -> psutil.Process | None:
        children = self._server.children()
        return self._server.engine() if children else None

    async def do_engine_killed(self) -> None:
        if (engine := self._engine()) is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.kill()

    async def do_engine_hung(self) -> None:
        """Stop the engine for a few seconds; the server may replace it in the meantime."""
        if (engine := self._engine()) is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.suspend()
            await self._hold()
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.resume()

    async def do_redis_killed(self) -> None:
        self._redis.stop()
        await self._hold()
        await asyncio.to_thread(self._redis.start)

    async def do_redis_flushed(self) -> None:
        await asyncio.to_thread(self._redis.client().flushall)

    async def do_redis_hung(self) -> None:
        self._redis.signal(signal.SIGSTOP)
        await self._hold()
        self._redis.signal(signal.SIGCONT)

    async def do_redis_full(self) -> None:
        await asyncio.to_thread(self._redis.configure, maxmemory="1mb", maxmemory_policy="noeviction")
        await self._hold()
        await asyncio.to_thread(self._redis.configure, maxmemory=str(REDIS_BYTES), maxmemory_policy="allkeys-lru")

    async def do_redis_expired(self) -> None:
        """Make every block expire within half a second."""
        client = self._redis.client()

        def expire() -> None:
            for name in client.scan_iter(match="spillover:*", count=500):
                client.pexpire(name, 500)

        await asyncio.to_thread(expire)

    async def do_disk_full(self) -> None:
        await asyncio.to_thread(self._disk.fill)
        await self._hold()
        self._disk.empty()

    async def do_disk_flipped(self) -> None:
        for path in self._disk.segments():
            with contextlib.suppress(OSError), path.open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                for _ in range(50):
                    at = self._rng.randrange(max(1, size))
                    file.seek(at)
                    byte = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 1 << self._rng.randrange(8)]) if byte else b"")

    async def do_disk_truncated(self) -> None:
        for path in self._disk.segments():
            with contextlib.suppress(OSError):
                os.truncate(path, int(path.stat().st_size * self._rng.random()))

    async def do_disk_deleted(self) -> None:
        for path in self._disk.segments():
            if self._rng.random() < 0.7:
                path.unlink(missing_ok=True)

    async def do_disk_folder_removed(self) -> None:
        shutil.rmtree(self._disk.path / "kv", ignore_errors=True)

    async def do_clients_left(self) -> None:
        await self._clients.disconnect(16)

    async def do_burst(self) -> None:
        await self._clients.burst(BURST)
