"""Starts, watches and stops the processes of all ranks but rank 0.

One thread starts and watches them. To the kernel it is their parent, so ranks are killed when this process exits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

import psutil

from spillover.engine.parallel.messages import STOP, Launch, Lost, Met, Started, decode_from_rank, encode
from spillover.errors import SpilloverError

log = logging.getLogger("spillover.engine")

POLL_SECONDS = 0.5  # seconds between two checks for ranks that hang
# Seconds that ranks may be without CPU time or disk reads while rank 0 waits; after that they count as hanging.
HANG_SECONDS = 3.0
QUIET_CPU_SECONDS = 0.05  # maximum CPU seconds of a rank that counts as not computing
STOP_SECONDS = 5.0  # seconds that ranks have to exit after STOP; then they are killed
LAST_MESSAGE_SECONDS = 0.5  # seconds to wait for the last message of a rank that has exited
START_SECONDS = 600.0  # timeout in seconds for a rank to load its part, after rank 0 has loaded its own


class RankLostError(RuntimeError):
    """A rank has exited, hangs or has failed, so the step that all ranks were computing has failed too."""


class RankProcesses:
    def __init__(self, launches: Sequence[Launch], waiting_since: Callable[[], float | None] = lambda: None) -> None:
        """Start a process per launch. `waiting_since`: returns since when rank 0 waits for others; None: no wait."""
        self._waiting_since = waiting_since
        self._only_stopped = False
        self.on_lost: Callable[[], None] = lambda: None  # called when a rank is lost, before the others are killed
        self.weight_bytes = 0  # bytes of weights of the ranks that have loaded their parts
        self._started = self._met = self._loaded = 0
        self._sending_since: float | None = None
        self._lost_reason: str | None = None  # why a rank was lost; None while all ranks run
        self._expected = False
        self._closing = self._over = False
        self._quiet: tuple[float, list[float]] | None = None  # (time since when no rank computes, CPU seconds by then)
        self._news = threading.Condition()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[Connection] = []
        self._open: list[Connection] = []  # connections that may still deliver messages
        self._lost_read, self._lost_write = os.pipe()  # `_lost_read` is readable once a rank is lost
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, args=(list(launches),), name="spillover-ranks", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def watch(self, waiting_since: Callable[[], float | None], only_stopped: bool = False) -> None:
        """Watch for ranks that hang while rank 0 waits. `only_stopped`: a rank without CPU time hangs only if its
        process is stopped."""
        self._waiting_since, self._only_stopped = waiting_since, only_stopped

    @property
    def lost_descriptor(self) -> int:
        """Return a descriptor that is readable once a rank is lost."""
        return self._lost_read

    def send(self, message: bytes) -> None:
        """Send a message to every rank."""
        self.check()
        self._sending_since = time.monotonic()  # sending blocks when a hanging rank's socket is full
        try:
            for rank in self._ranks:
                rank.send_bytes(message)
        except OSError as error:
            raise self.lost() from error
        finally:
            self._sending_since = None

    def check(self) -> None:
        """Raise RankLostError if a rank is lost."""
        if self._lost_reason is not None:
            raise RankLostError(self._lost_reason)

    def lost(self) -> RankLostError:
        """Return an error that says why a rank is lost, as soon as the reason is known."""
        with self._news:
            self._news.wait_for(lambda: self._lost_reason is not None, LAST_MESSAGE_SECONDS + POLL_SECONDS)
        return RankLostError(self._lost_reason or "a rank closed its connection")

    def wait_started(self) -> None:
        self._wait(lambda: self._started == len(self._ranks) > 0)

    def wait_met(self) -> None:
        self._wait(lambda: self._met == len(self._ranks))

    def wait_loaded(self) -> None:
        self._wait(lambda: self._loaded == len(self._ranks))

    def close(self) -> None:
        """Ask ranks to stop, kill those that do not, and release all resources; a second call does nothing."""
        with self._news:
            if self._closing:
                return
            self._closing = True
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.send_bytes(STOP)
        deadline = time.monotonic() + (STOP_SECONDS if self._lost_reason is None else 0.0)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()
        self._over = True
        os.write(self._wake_write, b"x")
        self._thread.join()
        for rank in self._ranks:
            rank.close()
        for descriptor in (self._lost_read, self._lost_write, self._wake_read, self._wake_write):
            os.close(descriptor)

    def _wait(self, done: Callable[[], bool]) -> None:
        with self._news:
            ended = self._news.wait_for(lambda: done() or self._lost_reason is not None, START_SECONDS)
        if self._lost_reason is not None:
            context = "" if self._expected else " while loading its part of the model"
            raise SpilloverError(self._lost_reason + context)
        if not ended:
            raise SpilloverError(f"a rank has not loaded its part of the model within {START_SECONDS:.0f} s")

    # The thread

    def _run(self, launches: list[Launch]) -> None:
        try:
            for launch in launches:
                self._spawn(launch)
        except OSError as error:
            self._fail(f"the process of a rank could not be started ({error})", True)
        while not self._over and self._lost_reason is None:
            found = wait([*self._open, self._wake_read], POLL_SECONDS)
            for rank in found:
                if isinstance(rank, Connection):
                    self._receive(rank)
            if not self._closing and self._is_stuck():
                self._fail(f"a rank hangs: rank 0 is waiting, and no rank has computed for {HANG_SECONDS:g} s"
                           + "".join(f"; rank {number} is stopped" for number in self._stopped()))

    def _spawn(self, launch: Launch) -> None:
        ours, theirs = socket.socketpair()
        passed = [theirs.fileno()] + ([launch.pool] if launch.pool is not None else [])
        environment = {**os.environ, "OMP_NUM_THREADS": str(launch.threads)}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "spillover.engine.parallel.rank_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, pass_fds=passed, env=environment)
        rank = Connection(ours.detach())
        with self._news:
            self._processes.append(process)
            self._ranks.append(rank)
            self._open.append(rank)
        with contextlib.suppress(OSError):  # if the process has already exited, _receive will notice
            rank.send_bytes(encode(launch))

    def _receive(self, rank: Connection) -> None:
        number = self._ranks.index(rank) + 1
        try:
            message = decode_from_rank(rank.recv_bytes())
        except (EOFError, OSError):
            self._open.remove(rank)
            if not self._closing:
                process = self._processes[number - 1]
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LAST_MESSAGE_SECONDS)
                self._fail(f"rank {number} (process {process.pid}) {_described(process.poll())}")
            return
        if isinstance(message, Lost):
            if not message.expected:
                log.error("Rank %d failed:\n%s", number, message.why.rstrip())
            last_line = message.why.strip().splitlines()[-1]
            self._fail(message.why if message.expected else f"rank {number} failed ({last_line})", message.expected)
            return
        with self._news:
            if isinstance(message, Started):
                self._started += 1
            elif isinstance(message, Met):
                self._met += 1
            else:
                self._loaded += 1
                self.weight_bytes += message.weight_bytes
            self._news.notify_all()

    def _is_stuck(self) -> bool:
        """Return whether rank 0 waits and no other rank has used the CPU or a disk for HANG_SECONDS: one of them is
        stopped, or waits endlessly. A slow rank is not stuck."""
        since, now = self._waiting_since() or self._sending_since, time.monotonic()
        if since is None:
            self._quiet = None
            return False
        seconds = [_cpu_seconds(process.pid) for process in self._processes]
        quiet = self._quiet
        reads = any(_is_in(process.pid, psutil.STATUS_DISK_SLEEP) for process in self._processes)
        if quiet is None or since > quiet[0] or reads or any(
                ran - before > QUIET_CPU_SECONDS for ran, before in zip(seconds, quiet[1], strict=True)) or (
                self._only_stopped and not self._stopped()):
            self._quiet = now, seconds
            return False
        return now - quiet[0] > HANG_SECONDS

    def _stopped(self) -> list[int]:
        """List the ranks whose processes are stopped."""
        return [number for number, process in enumerate(self._processes, 1)
                if _is_in(process.pid, psutil.STATUS_STOPPED)]

    def _fail(self, why: str, expected: bool = False) -> None:
        """Record the first reason and kill all ranks; rank 0, if it waits for one, notices the closed socket."""
        with self._news:
            if self._lost_reason is None:
                self._lost_reason, self._expected = why, expected
                os.write(self._lost_write, b"x")
            self._news.notify_all()
        self.on_lost()  # before the kill: a device may keep a process alive while another rank's step waits for it
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()


def _cpu_seconds(pid: int) -> float:
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0


def _is_in(pid: int, status: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == status)
    return False


def _described(code: int | None) -> str:
    if code is None:
        return "closed its connection"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
