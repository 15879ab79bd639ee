"""The engine's side of the process that tries out grammars, which is started at first use and restarted if it dies."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import Future

import msgspec

from spillover.engine.structured.grammar_matcher import Vocabulary
from spillover.engine.structured.grammar_process import Frames, Trial, Verdict, write_frame
from spillover.errors import GrammarRefused

CLOSE_SECONDS = 2.0  # timeout in seconds for the process to exit before it is killed
MAX_WAITING = 256  # maximum number of grammars being tried or waiting


class GrammarTrials:
    """The process that tries out grammars. Safe to use from any thread."""

    def __init__(self, vocabulary: Vocabulary, seconds: float, nbytes: int) -> None:
        """Set the limits of one grammar: `seconds` of CPU time and `nbytes` of memory."""
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._nbytes = nbytes
        self._ids = itertools.count()
        self._lock = threading.Lock()  # guards all below, and writing to the process
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: dict[int, Future[Verdict]] = {}
        self._closed = False

    def submit(self, source: str) -> Future[Verdict]:
        """Start a trial; the future gets a verdict, or GrammarRefused if the process dies or is closed."""
        future: Future[Verdict] = Future()
        with self._lock:
            if self._closed or len(self._waiting) >= MAX_WAITING:
                why = "the engine is closing" if self._closed else f"{MAX_WAITING} grammars wait to be compiled"
                future.set_exception(GrammarRefused(f"structured output could not be prepared: {why}; try again later",
                                                    "unavailable"))
                return future
            id = next(self._ids)
            self._waiting[id] = future
            try:
                process = self._process or self._start()
                assert process.stdin is not None
                write_frame(process.stdin.fileno(), msgspec.msgpack.encode(
                    Trial(id, source, self._seconds, self._nbytes)))
            except OSError as error:
                self._waiting.pop(id, None)
                future.set_exception(_unavailable(str(error)))
        return future

    @property
    def pid(self) -> int | None:
        """Return the id of the process; None if it is not running."""
        return self._process.pid if self._process is not None else None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            process, self._process = self._process, None
            if process is not None and process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()  # the process then exits, with its children
        if process is not None:
            try:
                process.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-m", "spillover.engine.structured.grammar_process"],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   env=os.environ | {"MALLOC_ARENA_MAX": "1"})  # keeps children's address space small
        assert process.stdin is not None
        self._process = process
        threading.Thread(target=self._listen, args=(process,), name="spillover-grammar-trials", daemon=True).start()
        write_frame(process.stdin.fileno(), msgspec.msgpack.encode(self._vocabulary))
        return process

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        frames = Frames()
        with process.stdout as answers:
            while data := os.read(answers.fileno(), 1 << 16):
                for frame in frames.feed(data):
                    verdict = msgspec.msgpack.decode(frame, type=Verdict)
                    with self._lock:
                        future = self._waiting.pop(verdict.id, None)
                    if future is not None:
                        future.set_result(verdict)
        with self._lock:
            if self._process is process:  # the process died; the next grammar starts another
                self._process = None
            lost, self._waiting = self._waiting, {}
        process.wait()
        for future in lost.values():
            future.set_exception(_unavailable("the process that compiles grammars has exited"))


def _unavailable(why: str) -> GrammarRefused:
    return GrammarRefused(f"structured output could not be prepared: {why}; try again", "unavailable")
