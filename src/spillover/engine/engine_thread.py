"""The thread that runs the engine of an `LLM`. Any number of other threads send it requests and wait for the answers.

Only this thread uses the scheduler, the cache and the runner. So these need no locks, thread-local state of libraries
(CUDA streams, OpenMP teams) is created only once, and Ctrl-C, which Python raises in the main thread, never interrupts
a step. Requests are added, finished and counted between two steps. The thread sleeps when there are no requests.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from spillover.engine.loop import Engine
from spillover.engine.output.output_processor import Answer
from spillover.engine.output.outputs import RequestOutput
from spillover.engine.requests.request import Request
from spillover.errors import SpilloverError

Result = TypeVar("Result")
Cancelled = Callable[[], bool]  # returns whether the caller has cancelled its requests; called while it waits

STALLED_SECONDS = 0.005  # seconds between two steps when all requests wait for copies from other tiers
ALIVE_SECONDS = 1.0  # seconds between two checks whether the engine thread is alive
LEAVE_SECONDS = 5.0  # timeout in seconds for the current step when the interpreter exits
CLOSED = "the LLM was closed; make a new one"


class Call:
    """One caller's request for answers to its prompts, and their state."""

    def __init__(self, answers: Sequence[Answer], snapshots: bool) -> None:
        """Make a call. `snapshots`: the caller wants a copy of its answer each time it has grown (streaming)."""
        self.answers = list(answers)
        self.snapshots = snapshots
        self.latest: RequestOutput | None = None
        self.ended: deque[Answer] = deque()  # complete answers that the caller has not read yet
        self.error: SpilloverError | None = None
        self.news = threading.Event()

    def fail(self, message: str, cause: BaseException | None = None) -> None:
        self.error = SpilloverError(message)
        self.error.__cause__ = cause
        self.news.set()


class EngineThread:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards putting into the inbox against closing it
        self._closed = False
        self._stopping = False
        self._ended: Future[None] = Future()
        # Used by the engine thread only:
        self._open: dict[str, tuple[Call, Answer]] = {}  # unfinished sequences, by request id
        self._leaving: list[Future[None]] = []  # resolved when the requests of their callers have left the engine
        self._thread = threading.Thread(target=self._run, name="spillover-engine", daemon=True)
        self._thread.start()

    # Called by any thread

    def outputs(self, answer: Answer, cancelled: Cancelled | None = None) -> Generator[RequestOutput]:
        """Yield one answer as it grows; closing the iterator aborts the request."""
        call = Call([answer], snapshots=True)
        try:
            self._put(partial(self._add, call))
            shown = None
            while shown is None or not shown.finished:
                self._wait(call, cancelled)
                if call.latest is not shown and call.latest is not None:
                    shown = call.latest
                    yield shown
        finally:
            self._end(call)

    def answers(self, answers: Sequence[Answer], cancelled: Cancelled | None = None) -> Generator[Answer]:
        """Yield each of the answers when it is complete; closing the iterator aborts the others."""
        call = Call(answers, snapshots=False)
        try:
            self._put(partial(self._add, call))
            for _ in answers:
                while not call.ended:
                    self._wait(call, cancelled)
                yield call.ended.popleft()
        finally:
            self._end(call)

    def run(self, work: Callable[[], Result]) -> Result:
        """Call `work` in the engine thread between two steps; return its result."""
        done: Future[Result] = Future()
        self._put(partial(_resolve, done, work))
        return self._result(done)

    def close(self) -> None:
        """Abort every request and close the engine; waiting callers get a SpilloverError."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(self._stop)
        if threading.current_thread() is not self._thread:
            self._result(self._ended)

    def abandon(self) -> None:
        """Stop the thread because it can no longer be used: the LLM was collected, or the interpreter exits."""
        with self._lock:
            if self._closed:
                return
            self._closed = self._stopping = True
            self._inbox.put(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join(LEAVE_SECONDS)

    def check_open(self) -> None:
        if self._closed:
            raise SpilloverError(CLOSED)

    def _put(self, work: Callable[[], None]) -> None:
        with self._lock:
            self.check_open()
            self._inbox.put(work)

    def _wait(self, call: Call, cancelled: Cancelled | None = None) -> None:
        """Wait for news of the call; raise its error if it failed or was cancelled."""
        while not call.news.wait(ALIVE_SECONDS):
            self._check_alive()
            if cancelled is not None and cancelled():
                raise SpilloverError("the request was cancelled by its caller")
        call.news.clear()
        if call.error is not None:
            raise call.error

    def _end(self, call: Call) -> None:
        """Abort the call's unfinished requests. If there are no other calls, the engine is idle afterwards."""
        done: Future[None] = Future()
        try:
            self._put(partial(self._drop, call, done))
        except SpilloverError:  # closed, which has aborted all requests
            return
        if threading.current_thread() is not self._thread:  # the garbage collector may close an iterator in it
            self._result(done)

    def _result(self, done: Future[Result]) -> Result:
        while True:
            try:
                return done.result(ALIVE_SECONDS)
            except TimeoutError:
                if done.done():
                    return done.result()
                self._check_alive()

    def _check_alive(self) -> None:
        if not self._thread.is_alive():
            raise SpilloverError("the LLM's engine thread is not running; a forked process must make an LLM of its own")

    # Called in the engine thread

    def _run(self) -> None:
        why = CLOSED
        try:
            while not self._stopping:
                self._process_inbox()
                if self._open or self._engine.has_copies_in_flight:
                    self._step()
        except BaseException as error:
            why = f"the engine thread failed ({error!r}); make a new LLM"
            raise
        finally:
            with self._lock:
                self._closed = self._stopping = True
            self._fail_all(why)
            self._drain()
            self._resolve_leaving()
            if not self._ended.done():
                self._ended.set_result(None)

    def _process_inbox(self) -> None:
        """Process what callers have put into the inbox; wait for it if there is nothing else to do."""
        if not self._engine.has_copies_in_flight or self._open:
            self._resolve_leaving()
        if not self._open and not self._engine.has_copies_in_flight:
            self._inbox.get()()
        self._drain()

    def _drain(self) -> None:
        while True:
            try:
                work = self._inbox.get_nowait()
            except queue.Empty:
                return
            work()

    def _add(self, call: Call) -> None:
        if self._stopping:
            call.fail(CLOSED)
        elif self._engine.failed:
            call.fail("the engine has failed in an earlier step, whose tokens are lost; make a new LLM")
        else:
            try:
                for answer in call.answers:
                    for request in answer.requests:
                        self._open[request.request_id] = call, answer
                        self._engine.scheduler.add(request)
            except Exception as error:
                self._fail(call, f"the request could not be added ({type(error).__name__}: {error})", error)

    def _drop(self, call: Call, done: Future[None]) -> None:
        for answer in call.answers:
            for request in answer.requests:
                if self._open.pop(request.request_id, None) is not None:
                    self._engine.scheduler.stop(request, "abort")
        self._leaving.append(done)

    def _stop(self) -> None:
        self._stopping = True
        self._fail_all(CLOSED)
        _resolve(self._ended, self._engine.close)

    def _resolve_leaving(self) -> None:
        for done in self._leaving:
            done.set_result(None)
        self._leaving.clear()

    def _step(self) -> None:
        steps = self._engine.num_steps
        try:
            changed = self._engine.step()
        except Exception as error:
            self._engine.failed = True
            self._fail_all(f"the engine failed in a step, and the requests in it are lost ({type(error).__name__}: "
                           f"{error}); make a new LLM", error)
            return
        if not changed and self._engine.num_steps == steps:
            self._engine.wait(STALLED_SECONDS)
        grown: dict[Call, Answer] = {}
        for request in changed:
            found = self._open.get(request.request_id)
            if found is not None and self._advance(*found, request):
                grown[found[0]] = found[1]
        for call, answer in grown.items():
            if call.snapshots:
                call.latest = answer.output()
                call.news.set()

    def _advance(self, call: Call, answer: Answer, request: Request) -> bool:
        """Apply a sequence's new tokens to its answer; return False if that made the call fail."""
        try:
            stop_string = answer.advance(request)
        except Exception as error:  # an error in one sequence's text must not affect other requests
            self._fail(call, f"the text of this request could not be made ({type(error).__name__}: {error})", error)
            return False
        if stop_string is not None:
            self._engine.scheduler.stop(request, "stop", stop_string)
        if request.finish_reason is not None:
            del self._open[request.request_id]
            if not any(each.request_id in self._open for each in answer.requests):  # once, after the last sequence
                call.ended.append(answer)
                call.news.set()
        return True

    def _fail(self, call: Call, message: str, cause: BaseException | None = None) -> None:
        for answer in call.answers:
            for request in answer.requests:
                if self._open.pop(request.request_id, None) is not None:
                    self._engine.scheduler.stop(request, "abort")
        call.fail(message, cause)

    def _fail_all(self, message: str, cause: BaseException | None = None) -> None:
        for call in {id(call): call for call, _ in self._open.values()}.values():
            self._fail(call, message, cause)


def _resolve(done: Future[Result], work: Callable[[], Result]) -> None:
    """Call `work`, and resolve the future with its result or exception."""
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)
