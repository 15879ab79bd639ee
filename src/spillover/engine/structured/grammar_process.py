"""The process that tries out grammars, started by `grammar_trial`.

It loads the vocabulary once and forks a child for each grammar. The child compiles it, computes masks for a few tokens,
and reports the cost; limits of CPU time and memory kill only the child. So a grammar that compiles for minutes,
exhausts memory or crashes the compiler does not affect other requests.

A grammar first gets a short trial; if that is not enough, it waits for one of the few long trials. So small grammars do
not wait for large ones. Standard input provides the vocabulary and then grammars; when it is closed, this process and
its children exit. Frames are msgpack, each preceded by its length in four bytes.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import selectors
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from llguidance import LLTokenizer

from spillover.engine.structured.grammar_matcher import STACK_BYTES, Vocabulary, compile_matcher, make_tokenizer

SHORT_SECONDS = 0.2  # CPU time of a short trial in seconds
PLACES = 2  # maximum number of concurrent children, of short and of long trials each
WALK_TOKENS = 24  # maximum number of tokens for which a trial computes masks
NICE = 5  # added niceness, as the engine computes on the same cores
SLACK_BYTES = 32 << 20  # additional address space for memory that is reserved but not used
_LENGTH_BYTES = 4

Outcome = Literal["fine", "invalid", "time", "memory", "crash"]


class Trial(msgspec.Struct, frozen=True, array_like=True):
    id: int
    source: str
    seconds: float  # limit of CPU time
    nbytes: int  # limit of memory


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    outcome: Outcome
    message: str = ""  # the compiler's message if the grammar is invalid
    nbytes: int = 0  # approximate memory of the compiled grammar
    seconds: float = 0.0  # CPU time of the trial
    id: int = 0


def write_frame(file: int, data: bytes) -> None:
    data = len(data).to_bytes(_LENGTH_BYTES, "big") + data
    while data:
        data = data[os.write(file, data):]


@dataclass
class Frames:
    """A buffer that assembles complete frames from bytes."""

    data: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[bytes]:
        self.data += data
        found = []
        while len(self.data) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self.data[:_LENGTH_BYTES], "big")
            if len(self.data) < end:
                break
            found.append(bytes(self.data[_LENGTH_BYTES:end]))
            del self.data[:end]
        return found


@dataclass
class _Child:
    trial: Trial
    pid: int
    short: bool
    deadline: float  # monotonic time after which it is killed, in case it gets no CPU time
    output: bytearray = field(default_factory=bytearray)


class TrialServer:
    def __init__(self, tokenizer: LLTokenizer, first: list[bytes]) -> None:
        self._tokenizer = tokenizer
        self._new: deque[Trial] = deque()
        self._queue_trials(first)
        self._long: deque[Trial] = deque()
        self._children: dict[int, _Child] = {}  # by the read end of their answer's pipe
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)

    def run(self, frames: Frames) -> None:
        """Serve until standard input is closed; `frames` may hold the beginning of the next grammar."""
        try:
            while True:
                self._start_children()
                for key, _ in self._selector.select(1.0 if self._children else None):
                    if key.fd == 0:
                        data = os.read(0, 1 << 16)
                        if not data:
                            return
                        self._queue_trials(frames.feed(data))
                    else:
                        self._receive(key.fd)
                for child in self._children.values():
                    if time.monotonic() > child.deadline:
                        _kill(child.pid)
        finally:
            for child in self._children.values():
                _kill(child.pid)

    def _queue_trials(self, frames: list[bytes]) -> None:
        self._new.extend(msgspec.msgpack.decode(frame, type=Trial) for frame in frames)

    def _start_children(self) -> None:
        for queue, short in ((self._new, True), (self._long, False)):
            while queue and sum(child.short == short for child in self._children.values()) < PLACES:
                self._fork(queue.popleft(), short)

    def _fork(self, trial: Trial, short: bool) -> None:
        seconds = min(trial.seconds, SHORT_SECONDS) if short else trial.seconds
        answers, answer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _child(self._tokenizer, trial, seconds, answer)
        os.close(answer)
        self._children[answers] = _Child(trial, pid, short, time.monotonic() + 10 + 20 * seconds)
        self._selector.register(answers, selectors.EVENT_READ)

    def _receive(self, fd: int) -> None:
        child = self._children[fd]
        data = os.read(fd, 1 << 16)
        if data:
            child.output += data
            return
        self._selector.unregister(fd)
        os.close(fd)
        del self._children[fd]
        _, status = os.waitpid(child.pid, 0)
        if child.output and not os.WIFSIGNALED(status):
            verdict = msgspec.msgpack.decode(bytes(child.output), type=Verdict)
        else:
            ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
            if ended_by == signal.SIGPROF and child.short and child.trial.seconds > SHORT_SECONDS:
                self._long.append(child.trial)
                return
            verdict = Verdict(_ENDED_BY.get(ended_by, "crash"))
        write_frame(1, msgspec.msgpack.encode(msgspec.structs.replace(verdict, id=child.trial.id)))


# Rust aborts if an allocation fails; SIGKILL is sent by this process to a child past its deadline.
_ENDED_BY: dict[int | None, Outcome] = {signal.SIGPROF: "time", signal.SIGKILL: "time", signal.SIGABRT: "memory"}


def _child(tokenizer: LLTokenizer, trial: Trial, seconds: float, answer: int) -> None:
    """Try the grammar, write the verdict, exit. The timer counts the CPU time of all threads and kills by SIGPROF."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust reports failed allocations there
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit = _memory(0) + STACK_BYTES + SLACK_BYTES + trial.nbytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        os.write(answer, msgspec.msgpack.encode(_try(tokenizer, trial.source)))
        code = 0
    except MemoryError:
        os.write(answer, msgspec.msgpack.encode(Verdict("memory")))
        code = 0
    finally:
        os._exit(code)


def _try(tokenizer: LLTokenizer, source: str) -> Verdict:
    before, started = _memory(1), time.process_time()
    matcher = compile_matcher(tokenizer, source)
    if matcher.is_error():
        return Verdict("invalid", str(matcher.get_error())[:4096])
    rng = random.Random(0)
    for step in range(WALK_TOKENS):
        if matcher.is_stopped():
            break
        mask = matcher.compute_bitmask()
        if step == 0 and matcher.is_error():  # the first mask exceeds the limits of a step
            return Verdict("invalid", str(matcher.get_error())[:4096])
        token = _some_token(mask, rng)
        if token is None or matcher.try_consume_tokens([token]) != 1:
            break
    return Verdict("fine", "", max(0, _memory(1) - before), time.process_time() - started)


def _some_token(mask: bytes, rng: random.Random) -> int | None:
    start = rng.randrange(len(mask))
    for place in (*range(start, len(mask)), *range(start)):
        if bits := mask[place]:
            token: int = place * 8 + (bits & -bits).bit_length() - 1
            return token
    return None


def _memory(column: int) -> int:
    """Return the size of this process in bytes: its address space for column 0, its resident memory for 1."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[column]) * resource.getpagesize()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def main() -> int:
    for each in (signal.SIGINT, signal.SIGTERM):  # the engine handles them, and closes our standard input
        signal.signal(each, signal.SIG_IGN)
    os.nice(NICE)
    frames, first = Frames(), list[bytes]()
    while not first:
        data = os.read(0, 1 << 20)
        if not data:
            return 0
        first = frames.feed(data)
    tokenizer = make_tokenizer(msgspec.msgpack.decode(first[0], type=Vocabulary))
    TrialServer(tokenizer, first[1:]).run(frames)
    return 0


if __name__ == "__main__":
    sys.exit(main())
