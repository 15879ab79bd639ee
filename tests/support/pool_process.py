"""The process that owns a shared pool, for tests: it runs in a temporary folder and can be killed and restarted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from spillover.memory.shared_pool.client import PoolUnavailableError, ask_owner
from spillover.memory.shared_pool.wire import Ask, Report

PROGRAM = """
import signal, sys
from pathlib import Path
from spillover.errors import SpilloverError
from spillover.memory.shared_pool.owner import PoolOwner
try:
    with PoolOwner(int(sys.argv[1]), Path(sys.argv[2])) as owner:
        signal.signal(signal.SIGTERM, lambda *_: owner.stop())
        owner.run()
except SpilloverError as error:
    sys.exit(str(error))
"""


class PoolProcess:
    def __init__(self, capacity: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pool-"))  # short, because the path of a socket is limited
        self.path = self.folder / "private" / "sock"
        self.capacity = capacity
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(self.capacity), str(self.path)],
                                            stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while True:
            try:
                assert self.report().pid == self.process.pid
            except PoolUnavailableError:
                assert self.process.poll() is None, (self.folder / "log").read_text()
                assert time.monotonic() < deadline, "the owner did not start within 30 s"
                time.sleep(0.01)
            else:
                return

    def report(self) -> Report:
        return ask_owner(self.path, Ask(), Report, 10.0)

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(10)
            self.process = None

    def freeze(self) -> None:
        """Stop the process: it accepts connections but does not answer until thaw()."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> PoolProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self.folder)


def mapped_pools(pid: int | str = "self") -> int:
    """Return the number of shared pools that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if "memfd:spillover-pool" in line})


def open_files(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
