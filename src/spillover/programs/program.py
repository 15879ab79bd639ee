"""`@program`: a function that writes a structured prompt, to be run once, in a batch, or streamed."""

from __future__ import annotations

import asyncio
import functools
import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, overload

from spillover.errors import SpilloverError
from spillover.programs.backend import Backend
from spillover.programs.backends import backend_of
from spillover.programs.expressions import check_options
from spillover.programs.lifetime import Lifetime, ProgramError
from spillover.programs.run import Chunk, Run
from spillover.programs.state import State
from spillover.progress import counted

TIMEOUT = 600.0  # timeout of one run in seconds
RESERVED = ("backend", "timeout")
Body = Callable[..., Any]


class Program:
    """A program, created by `@program`. Each of its methods takes the function's own arguments, and:

    `backend`: an LLM, an AsyncLLM, or the URL of an OpenAI-compatible server; by default that of `set_default_backend`.
    `timeout`: the timeout of one run in seconds, for all branches together.
    """

    def __init__(self, body: Body, options: dict[str, Any], prefill: bool = True) -> None:
        self._body = body
        self._options = options
        self._prefill = prefill
        self.name = body.__name__
        functools.update_wrapper(self, body)
        check_options(options)
        parameters = list(inspect.signature(body).parameters)
        if not parameters:
            raise ProgramError(f"the program {self.name} takes no state: write `def {self.name}(s, ...)`")
        clash = next((name for name in parameters if name in RESERVED), None)
        if clash is not None:
            raise ProgramError(f"the program {self.name} has an argument '{clash}', which run() takes itself; give it "
                               "another name")

    def __call__(self, s: State, *args: Any, **kwargs: Any) -> Any:
        """Write this program's text into the state of another program."""
        return self._body(s, *args, **kwargs)

    def run(self, *args: Any, backend: Any = None, timeout: float = TIMEOUT, **kwargs: Any) -> State:
        """Run to completion and return the state; the function's own result is its `returned`."""
        return self._run(_awaited(backend_of(backend)), Lifetime(timeout), None, args, kwargs)

    async def run_async(self, *args: Any, backend: Any = None, timeout: float = TIMEOUT, **kwargs: Any) -> State:
        """Run in a thread; cancelling the task cancels the program's requests."""
        lifetime, found = Lifetime(timeout), backend_of(backend)
        running = asyncio.ensure_future(asyncio.to_thread(self._run, found, lifetime, None, args, kwargs))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            lifetime.cancel()
            await asyncio.wait([running])
            running.exception()
            raise

    def stream(self, *args: Any, backend: Any = None, timeout: float = TIMEOUT, **kwargs: Any) -> Stream:
        """Start a run; the result yields the text of all branches as it arrives."""
        found = _awaited(backend_of(backend))
        return Stream(lambda lifetime, chunks: self._run(found, lifetime, chunks, args, kwargs), timeout)

    def run_batch(self, batch: Sequence[Mapping[str, Any]], *, backend: Any = None, timeout: float = TIMEOUT,
                  num_threads: int = 64, progress: bool = True, return_exceptions: bool = False) -> list[Any]:
        """Run once for each dict of arguments, `num_threads` at a time, and return the states in their order.

        Common prefixes of their prompts are computed once. The first error cancels the other runs and is raised with
        the index in the batch; with `return_exceptions` it is put into the list instead, and the others continue.
        """
        found = _awaited(backend_of(backend))
        if num_threads < 1:
            raise ProgramError(f"num_threads must be at least 1; got {num_threads}")
        lifetimes: dict[int, Lifetime] = {}
        stopped = threading.Event()

        def one(index: int) -> State:
            lifetimes[index] = lifetime = Lifetime(timeout)
            if stopped.is_set():
                lifetime.cancel()
            return self._run(found, lifetime, None, (), batch[index])

        def stop() -> None:
            stopped.set()
            for lifetime in list(lifetimes.values()):
                lifetime.cancel()

        results: list[Any] = [None] * len(batch)
        pool = ThreadPoolExecutor(min(num_threads, max(1, len(batch))), "spillover-programs")
        try:
            futures: dict[Future[State], int] = {pool.submit(one, index): index for index in range(len(batch))}
            with counted(len(batch), self.name, progress) as show:
                left, begun = set(futures), time.monotonic()
                while left:
                    done, left = wait(left, timeout=1.0, return_when=FIRST_COMPLETED)
                    for future in done:
                        error = future.exception()
                        if error is not None and not (return_exceptions and isinstance(error, Exception)):
                            raise _in_batch(error, futures[future], self.name)
                        results[futures[future]] = error if error is not None else future.result()
                    ended = len(batch) - len(left)
                    show(ended, f"{ended / max(time.monotonic() - begun, 1e-9):,.1f} programs/s")
        except BaseException:
            stop()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        return results

    def _run(self, backend: Backend, lifetime: Lifetime, chunks: queue.SimpleQueue[Chunk | None] | None,
             args: Sequence[Any], kwargs: Mapping[str, Any]) -> State:
        with Run(backend, lifetime, self._options, self._prefill, chunks) as run:
            run.main.returned = self._body(run.main, *args, **kwargs)
            run.finish()
        return run.main


class Stream:
    """The output of a running program. Leaving it early, by `close` or `with`, cancels the program's requests."""

    def __init__(self, run: Callable[[Lifetime, queue.SimpleQueue[Chunk | None]], State], timeout: float) -> None:
        self._lifetime = Lifetime(timeout)
        self._chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._result: Future[State] = Future()

        def body() -> None:
            try:
                self._result.set_result(run(self._lifetime, self._chunks))
            except BaseException as error:
                self._result.set_exception(error)
            finally:
                self._chunks.put(None)

        self._thread = threading.Thread(target=body, name="spillover-program-stream", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Chunk]:
        """Yield chunks until the program ends; raise the program's error, if any."""
        while (chunk := self._take()) is not None:
            yield chunk
        self._result.result(0)

    @property
    def state(self) -> State:
        """Wait for the program to end and return its state."""
        while self._take() is not None:
            pass
        return self._result.result(0)

    def close(self) -> None:
        """Cancel the program if it still runs, and wait until its requests have finished."""
        self._lifetime.cancel()
        while self._take() is not None:
            pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def _take(self) -> Chunk | None:
        """Return the next chunk; None once the program has ended. The wait is bounded by the program's own timeout."""
        chunk = self._chunks.get()
        if chunk is None:
            self._chunks.put(None)
            self._thread.join()
        return chunk


@overload
def program(body: Body) -> Program: ...
@overload
def program(*, prefill: bool = True, **options: Any) -> Callable[[Body], Program]: ...
def program(body: Body | None = None, *, prefill: bool = True, **options: Any) -> Any:
    """Turn a function that writes into a state into a program. `options` are defaults of every gen in it; `prefill`:
    whether fixed text is prefilled ahead of its gen."""
    if body is not None:
        return Program(body, {})
    return lambda given: Program(given, options, prefill)


def _awaited(backend: Backend) -> Backend:
    """Refuse a blocking wait in the thread of the event loop that the engine needs to answer."""
    try:
        here = asyncio.get_running_loop()
    except RuntimeError:
        return backend
    if getattr(backend, "loop", None) is here:
        raise ProgramError("a program on an AsyncLLM is awaited in its event loop: `await f.run_async(...)`")
    return backend


def _in_batch(error: BaseException, index: int, name: str) -> BaseException:
    if not isinstance(error, SpilloverError):
        error.add_note(f"in item {index} of a batch of {name}")
        return error
    item_error = ProgramError(f"item {index} of the batch: {error}")
    item_error.branch = getattr(error, "branch", None)
    item_error.__cause__ = error
    return item_error
