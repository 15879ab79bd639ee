"""Processes that constantly store and load, and the pool's process, are killed and stopped in random order: no wrong
byte is ever loaded, and nothing leaks. benchmarks/host_pool_kills.py does the same with engines and compares tokens."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from support.pool_process import PoolProcess

PAYLOAD = 10_000
ROUNDS = 10
WORKER = """
import os, random, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[4].split(os.pathsep)
from spillover.memory.shared_pool.tier import SharedPoolTier
from support.tier_calls import IDENTITY, block_bytes, block_key, get, put
path, payload, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(seed)
tier = SharedPoolTier(path, payload, IDENTITY, {"model": "tiny"}, lambda: None, timeout=2.0, lookup_timeout=0.5,
                      retry_seconds=0.05, probe_seconds=0.1)
found = 0
while True:
    numbers = rng.sample(range(80), 12)
    if rng.random() < 0.5:
        put(tier, {block_key(number): block_bytes(number, payload) for number in numbers})
    else:
        for number, loaded in zip(numbers, get(tier, [block_key(number) for number in numbers], payload)):
            if loaded is not None and loaded != block_bytes(number, payload):
                print("wrong bytes", flush=True)
                sys.exit(3)
            found += loaded is not None
    print(found, flush=True)
    if not tier.stats().available:
        time.sleep(0.01)
"""


def start_worker(pool: PoolProcess, seed: int) -> subprocess.Popen[bytes]:
    with (pool.folder / f"worker-{seed}").open("wb") as log:
        return subprocess.Popen([sys.executable, "-c", WORKER, str(pool.path), str(PAYLOAD), str(seed),
                                 os.pathsep.join(sys.path)], stdout=log, stderr=log)


def said(pool: PoolProcess, seed: int) -> list[str]:
    return (pool.folder / f"worker-{seed}").read_text().splitlines()


def progress(pool: PoolProcess, seeds: list[int], lines: int) -> None:
    """Wait until each of these workers has printed `lines` more lines."""
    before = {seed: len(said(pool, seed)) for seed in seeds}
    deadline = time.monotonic() + 30
    while any(len(said(pool, seed)) < before[seed] + lines for seed in seeds):
        assert time.monotonic() < deadline, "a worker hangs"
        time.sleep(0.005)


def test_kills_in_random_orders() -> None:
    rng = random.Random(6)
    shm = set(os.listdir("/dev/shm"))
    with PoolProcess(16 * 4 * 12_288) as pool:  # room for 64 of 80 blocks
        workers = {seed: start_worker(pool, seed) for seed in range(2)}
        made = 2
        try:
            progress(pool, list(workers), 5)
            for turn in range(ROUNDS):
                faults = rng.choice([["owner"], ["worker"], ["owner", "worker"], ["worker", "owner"], ["stop"]])
                for fault in faults:
                    time.sleep(rng.random() * 0.05)
                    if fault == "owner":
                        pool.kill()
                    elif fault == "worker":
                        seed = rng.choice(list(workers))
                        victim = workers.pop(seed)
                        victim.kill()
                        victim.wait(10)
                    else:
                        pool.freeze()
                        time.sleep(rng.random() * 0.3)
                        pool.thaw()
                if "owner" in faults:
                    pool.start()
                if "worker" in faults:
                    workers[made] = start_worker(pool, made)
                    made += 1
                progress(pool, list(workers), 3)
                assert all(worker.poll() is None for worker in workers.values()), turn
                held = pool.report()
                assert held.used <= held.prepared <= held.capacity <= pool.capacity
            progress(pool, list(workers), 5)
        finally:
            for worker in workers.values():
                worker.send_signal(signal.SIGKILL)
                worker.wait(10)
        lines = [line for seed in range(made) for line in said(pool, seed)]
        assert not [line for line in lines if not line.isdigit() and not line.startswith("shared pool at")]
        assert max(int(line) for line in lines if line.isdigit()) > 0, "nothing was ever loaded"
        deadline = time.monotonic() + 10
        while pool.report().engines:
            assert time.monotonic() < deadline, "the owner does not notice that engines are gone"
            time.sleep(0.01)
        held = pool.report()
        assert held.used == sum(model.blocks for model in held.models) * 12_288, "slots that nobody gave back"
        assert pool.process is not None
        assert len(os.listdir(f"/proc/{pool.process.pid}/fd")) < 20
        assert set(os.listdir("/dev/shm")) <= shm
        assert {Path(name).name for name in os.listdir(pool.path.parent)} == {"sock", "sock.lock"}
