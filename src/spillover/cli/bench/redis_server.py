"""A temporary Valkey or Redis server for a measurement, and the speed of such a server."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spillover.errors import SpilloverError

BINARIES = ("valkey-server", "redis-server")
START_SECONDS = 10.0
STOP_SECONDS = 5.0
RATE_BLOCKS = 8  # number of blocks with which a link is timed
RATE_PASSES = 3  # number of timings, of which the best counts


def find_server() -> str | None:
    return next((path for path in map(shutil.which, BINARIES) if path is not None), None)


@contextmanager
def run_server(binary: str, max_bytes: int) -> Iterator[str]:
    """Run a server and yield its address; it keeps data only in memory and evicts the least recently used when full."""
    with tempfile.TemporaryDirectory(prefix="spill-") as folder:
        path = Path(folder) / "server.sock"
        process = subprocess.Popen(
            [binary, "--port", "0", "--unixsocket", str(path), "--dir", folder, "--save", "", "--appendonly", "no",
             "--maxmemory", str(max_bytes), "--maxmemory-policy", "allkeys-lru"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait_until_up(process, path, binary)
            yield f"unix://{path}"
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            process.kill()
            process.wait()


def measure_remote(url: str, block_bytes: int) -> tuple[float, float]:
    """Return the bytes per second to and from a server, with several blocks on one connection."""
    import redis

    client = redis.Redis.from_url(url, socket_timeout=START_SECONDS)
    keys = [f"spillover-rate-{os.getpid()}-{index}" for index in range(RATE_BLOCKS)]
    payload = os.urandom(block_bytes)
    rates = []
    try:
        for command in ("set", "get"):
            best = float("inf")
            for _ in range(RATE_PASSES):
                start = time.perf_counter()
                with client.pipeline(transaction=False) as pipeline:
                    for key in keys:
                        pipeline.set(key, payload, ex=60) if command == "set" else pipeline.get(key)
                    pipeline.execute()
                best = min(best, time.perf_counter() - start)
            rates.append(RATE_BLOCKS * block_bytes / best)
        client.delete(*keys)
    except redis.RedisError as error:
        raise SpilloverError(f"--remote {url} does not answer ({error}); start it, or leave --remote out") from error
    finally:
        client.close()
    return rates[0], rates[1]


def _wait_until_up(process: subprocess.Popen[bytes], path: Path, binary: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1.0)
            client.connect(str(path))
            client.sendall(b"PING\r\n")
            if client.recv(16).startswith(b"+PONG"):
                return
        time.sleep(0.02)
    raise SpilloverError(f"{binary} did not start within {START_SECONDS:.0f} s; name a running server by --remote URL")
