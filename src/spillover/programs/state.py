"""A program's state: the text of a branch so far, and its pending tasks, which a thread of the branch runs in order.

`s += ...` queues a task and returns at once, so the branches of a fork run concurrently; `s["name"]` waits. The thread
of a branch starts when there is a request for the model and ends when there is none.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spillover.errors import SpilloverError, did_you_mean
from spillover.programs.backend import Message, TokenCounts
from spillover.programs.context import Context
from spillover.programs.expressions import MAX_TOKENS, Expression, Gen, Role, Select, Spoken, Text, parts_of
from spillover.programs.lifetime import ProgramCancelled, ProgramError
from spillover.programs.steps import generate, prefill_ahead, select_likeliest

if TYPE_CHECKING:
    from spillover.programs.run import Run

AHEAD_SECONDS = 0.005  # idle time before fixed text is prefilled ahead
AHEAD_CHARACTERS = 256  # length of fixed text from which on an idle branch checks whether to prefill it ahead


@dataclass
class Task:
    """A task of a branch."""

    work: Callable[[], Any]
    name: str | None = None
    urgent: bool = True  # whether it sends a request, or others wait for it
    fresh: int = 0  # number of characters of fixed text that may be prefilled ahead
    done: threading.Event = field(default_factory=threading.Event)
    value: Any = None
    details: dict[str, Any] = field(default_factory=dict)
    error: ProgramError | None = None


class State:
    """One branch of a running program."""

    def __init__(self, run: Run, name: str, context: Context | None) -> None:
        """Create a branch. `context` is None for a branch of a fork, which gets it once its parent has reached it."""
        self.name = name
        self.returned: Any = None  # the result of the program's function, in the main branch
        self._run = run
        self._context = context or Context(run.backend)
        self._started = threading.Event()
        if context is not None:
            self._started.set()
        self._lock = threading.Condition()
        self._tasks: deque[Task] = deque()
        self._working = False
        self._queued = 0  # number of fresh characters in the queue
        self._fresh = 0  # number of fresh characters added since the last request
        self._named: dict[str, Task] = {}
        self._last: Task | None = None
        self._error: ProgramError | None = None
        self._role: Role | None = None  # role of the message that the program is writing
        self._inherited = False  # the parent began that message; it is closed when this branch begins another
        self._counts = TokenCounts()
        self._branches: list[State] = []

    # Writing

    def __iadd__(self, value: str | Expression) -> State:
        for part in parts_of(value):
            self._add(part)
        return self

    def system(self) -> Any:
        """Write the system message: `with s.system(): s += ...`."""
        return self._speaking("system")

    def user(self) -> Any:
        return self._speaking("user")

    def assistant(self) -> Any:
        return self._speaking("assistant")

    def fork(self, branches: int | Sequence[str]) -> Forks:
        """Return n branches, or one per name, each of which continues independently from here."""
        before = len(self._branches)  # branches of earlier forks, from which the numbering continues
        names = [str(before + index) for index in range(branches)] if isinstance(branches, int) else list(branches)
        if not names or len(set(names)) != len(names):
            raise ProgramError(f"fork takes how many branches, or a name for each; got {branches!r}")
        made = [State(self._run, name if self.name == "main" else f"{self.name}.{name}", None) for name in names]
        for state in made:
            state._named, state._role = dict(self._named), self._role
            state._inherited = self._role is not None
            self._run.register(state)
        self._branches += made

        def start() -> None:
            for state in made:
                state._context = self._context.forked()
                state._started.set()

        self._put(Task(start))
        return Forks(self, made)

    # Reading

    def __getitem__(self, name: str) -> Any:
        """Wait for the result of the gen or select of this name and return it. After a join, a list by branch."""
        return self._wait(self._task(name)).value

    def __setitem__(self, name: str, value: Any) -> None:
        """Store a value of the program under a name."""
        task = Task(lambda: value, name)
        task.value = value
        task.done.set()
        self._named[name] = task

    def __contains__(self, name: str) -> bool:
        return name in self._named

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self._named else default

    def meta(self, name: str) -> dict[str, Any]:
        """Return the details of a gen (finish_reason, stop_reason, token_ids, counts) or a select (scores)."""
        return dict(self._wait(self._task(name)).details)

    def text(self) -> str:
        """Return the whole text, fixed and generated; for a chat one paragraph per message."""
        self.sync()
        return self._context.text()

    def messages(self) -> list[Message]:
        """Return the messages of a chat."""
        self.sync()
        return list(self._context.messages)

    def tokens_by_source(self) -> TokenCounts:
        """Return the prompt tokens of all requests of this branch and its forks by where their KV came from; for
        branches that failed, those of the requests before."""
        self._wait_all()
        return sum((branch.tokens_by_source() for branch in self._branches), self._counts)

    @property
    def rebuilds(self) -> int:
        """Return how often the chat template did not extend the previous rendering, here and in the forks."""
        self._wait_all()
        return self._context.rebuilds + sum(branch.rebuilds for branch in self._branches)

    def sync(self) -> None:
        """Wait until all tasks so far are done; raise the error of a failed one."""
        last = self._wait_all()
        if last is not None:
            self._wait(last)

    def _wait_all(self) -> Task | None:
        """Wait until all tasks so far are done or have failed; return the last one."""
        with self._lock:
            last = self._last
            self._wake()
        if last is not None and not last.done.is_set() and not last.done.wait(self._run.lifetime.remaining()):
            self._run.lifetime.remaining()
        return last

    # The program's thread

    def _add(self, part: Expression) -> None:
        if isinstance(part, Spoken):
            with self._speaking(part.role):
                for one in part.parts:
                    self._add(one)
        elif isinstance(part, Text):
            fresh = len(part.text) if self._role in (None, "assistant") else 0
            self._put(Task(lambda: self._wrote(part.text), urgent=False, fresh=fresh))
        elif isinstance(part, Gen):
            options = {"max_tokens": MAX_TOKENS, **self._run.defaults, **part.options}
            self._ask(part.name, lambda task: generate(self, self._run, task, options))
        elif isinstance(part, Select):
            self._ask(part.name, lambda task: select_likeliest(self, self._run, task, part))
        else:
            raise ProgramError(f"{type(part).__name__} cannot be part of a program's text")

    @contextmanager
    def _speaking(self, role: Role) -> Iterator[None]:
        if self._role is not None and not self._inherited:
            raise ProgramError(f"a message of {role} begins before that of {self._role} has ended", self.name)
        if self._role is not None:
            self._put(Task(lambda: self._context.close(), urgent=False))
        self._role, self._inherited = role, False
        self._put(Task(lambda: self._context.open(role), urgent=False))
        try:
            yield
        finally:
            self._role = None
        self._put(Task(lambda: self._context.close(), urgent=False, fresh=AHEAD_CHARACTERS if role == "user" else 0))

    def _wrote(self, text: str) -> None:
        self._context.add(text)
        self._run.emit(self.name, None, text)

    def _ask(self, name: str | None, work: Callable[[Task], Any]) -> None:
        task = Task(lambda: None, name)
        task.work = lambda: work(task)
        self._put(task)
        if name is not None:
            self._named[name] = task

    def _put(self, task: Task) -> None:
        self._run.check_open()
        with self._lock:
            if self._error is not None:
                raise self._seen(self._error)
            self._tasks.append(task)
            self._last = task
            self._queued += task.fresh
            if task.urgent or self._queued + self._fresh >= AHEAD_CHARACTERS:
                self._wake()
            self._lock.notify()

    def _task(self, name: str) -> Task:
        found = self._named.get(name)
        if found is None:
            raise ProgramError(f"there is no gen or select named '{name}'"
                               f"{did_you_mean(name, self._named, listed=True)}", self.name)
        return found

    def _wait(self, task: Task) -> Task:
        if not task.done.is_set() and not task.done.wait(self._run.lifetime.remaining()):
            self._run.lifetime.remaining()
        if task.error is not None:
            raise self._seen(task.error)
        return task

    def _seen(self, error: ProgramError) -> ProgramError:
        self._run.seen(error)
        return error

    # The branch's thread

    def _wake(self) -> None:
        """Start the thread if it is not running; called with the lock held."""
        if not self._working and self._tasks:
            self._working = True
            self._run.start(self._work)

    def _work(self) -> None:
        task: Task | None = None
        try:
            while not self._started.is_set():
                self._started.wait(min(1.0, self._run.lifetime.remaining()))
            while (task := self._next()) is not None:
                self._run.lifetime.remaining()
                task.value = task.work()
                task.done.set()
                task = None
        except BaseException as error:
            self._fail(task, error)

    def _next(self) -> Task | None:
        """Return the next task; None if the thread must end. If no task comes soon, known text is prefilled ahead."""
        with self._lock:
            if not self._tasks and self._fresh >= AHEAD_CHARACTERS and not self._run.ended:
                self._lock.wait(AHEAD_SECONDS)
            if self._tasks:
                task = self._tasks.popleft()
                self._queued -= task.fresh
                self._fresh = 0 if task.urgent else self._fresh + task.fresh
                return task
            if self._fresh < AHEAD_CHARACTERS or self._run.ended:
                self._working = False
                return None
            self._fresh = 0
        prefill_ahead(self, self._run)
        return self._next()

    def _fail(self, task: Task | None, error: BaseException) -> None:
        if isinstance(error, ProgramError) and error.branch is not None:
            failure = error
        elif isinstance(error, ProgramCancelled):
            failure = ProgramCancelled(str(error), self.name)
        elif isinstance(error, SpilloverError):
            failure = ProgramError(str(error), self.name)
        else:
            failure = ProgramError(f"{type(error).__name__}: {error}", self.name)
        if failure is not error:
            failure.__cause__ = error
        with self._lock:
            self._error = failure
            waiting = [*([task] if task is not None else []), *self._tasks]
            self._tasks.clear()
            self._working = False
        for each in waiting:
            each.error = failure
            each.done.set()
        for branch in self._branches:
            if not branch._started.is_set():
                branch._fail_unstarted(failure)

    def _fail_unstarted(self, error: ProgramError) -> None:
        """Fail a branch that its parent did not reach."""
        with self._lock:
            self._error = error
            waiting, self._working = list(self._tasks), True
            self._tasks.clear()
        for each in waiting:
            each.error = error
            each.done.set()
        self._started.set()
        for branch in self._branches:
            branch._fail_unstarted(error)

    # Called by tasks in that thread

    @property
    def context(self) -> Context:
        return self._context

    def count(self, counts: TokenCounts) -> None:
        self._counts += counts


class Forks(Sequence[State]):
    """The branches of a fork, in their order."""

    def __init__(self, parent: State, branches: Sequence[State]) -> None:
        self._parent = parent
        self._branches = list(branches)

    def __getitem__(self, index: Any) -> Any:
        return self._branches[index]

    def __setitem__(self, index: int, value: State) -> None:
        """Allow `forks[0] += ...`, which assigns; a branch cannot be replaced."""
        if value is not self._branches[index]:
            raise ProgramError("a branch of a fork cannot be replaced by another; write into it with forks[i] += ...")

    def __len__(self) -> int:
        return len(self._branches)

    def __iadd__(self, value: str | Expression) -> Forks:
        """Write the same text in every branch."""
        for branch in self._branches:
            branch += value
        return self

    def join(self) -> list[State]:
        """Wait for all branches; a name set in them since the fork becomes the list of their values in the parent."""
        for branch in self._branches:
            branch.sync()
        names = {name: None for branch in self._branches for name, task in branch._named.items()
                 if self._parent._named.get(name) is not task}
        for name in names:
            self._parent[name] = [branch.get(name) for branch in self._branches]
        return list(self._branches)
