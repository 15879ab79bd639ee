"""Progress of long operations with an estimate of the time left: a moving bar on a terminal, log lines elsewhere.

Works on text and numbers only, so that the command line and `LLM` show the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress as rich
from rich.console import Console
from rich.text import Text

from spillover.units import format_bytes

Show = Callable[[str, int, int], None]  # (stage, amount done, total amount); a total of 0: unknown
COMPILING = "Compiling native CPU kernels (first run)"
CAPTURING = "Compiling and capturing GPU kernels"
IMPORTING = "Importing torch"
PLANNING = "Planning the memory"
TOKENIZER = "Reading the tokenizer"
WEIGHTS = "Loading weights"
SUBSTITUTES = "Quantising substitute layers"
COMPARING = "Comparing bits at every number of rows"
MEASURING = "Measuring this machine's memory and matrix rates"
ASKING, ANSWERING, TRAINING = "Asking the model for prompts", "Answering and scoring", "Training the draft model"
_COUNTED = (COMPILING, CAPTURING, COMPARING, ASKING, ANSWERING, TRAINING)  # counted in items; others in bytes
# Prefixes of stages that print a line as soon as they begin where there is no bar.
_LONG = ("Compiling", "Downloading", "Waiting", "Exporting", "Quantising", "Asking", "Answering", "Training")
_LINE_SECONDS = 10.0  # minimum time between two lines where there is no bar


@contextmanager
def stages(console: Console | None = None) -> Iterator[Show]:
    """Yield a function to call with each stage and its progress. The bar appears at the first call, goes at the end."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(console)
        return
    bar = rich.Progress("{task.description}", rich.BarColumn(bar_width=24), _Done(), rich.TimeElapsedColumn(), _Left(),
                        console=console, transient=True)
    task = bar.add_task("", total=None, start=False)
    lock = threading.Lock()
    shown = ""

    def show(what: str, done: int, total: int) -> None:
        nonlocal shown
        with lock:
            if what != shown:  # a new stage: restart the elapsed time
                bar.reset(task, description=what, total=total or None, completed=done)
                shown = what
            if not bar.live.is_started:
                bar.start()
            bar.update(task, completed=done, total=total or None)

    try:
        yield show
    finally:
        bar.stop()


@contextmanager
def counted(total: int, what: str, shown: bool = True) -> Iterator[Callable[[int, str], object]]:
    """Yield a function to call with the number of items done and a short status text. Silent if stderr is a file."""
    if not shown:
        yield lambda done, now: None
        return
    console = Console(stderr=True)
    bar = rich.Progress("{task.description}", rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn(),
                        "{task.fields[now]}", console=console, transient=True,
                        disable=not (console.is_terminal or console.is_jupyter))
    task = bar.add_task(what, total=total, now="")
    with bar:
        yield lambda done, now: bar.update(task, completed=done, now=now)


class _Done(rich.ProgressColumn):
    def render(self, task: rich.Task) -> Text:
        if not task.total:
            return Text("")
        if task.description in _COUNTED:
            return Text(f"{task.completed:.0f}/{task.total:.0f}")
        return Text(f"{format_bytes(task.completed)} of {format_bytes(task.total)}")


class _Left(rich.TimeRemainingColumn):
    def render(self, task: rich.Task) -> Text:
        if not task.total or task.time_remaining is None:
            return Text("")
        return Text(f"{task.time_remaining:.0f} s left")


class _Lines:
    """Progress for logs and pipes: a line when a long stage begins, and one every _LINE_SECONDS while it runs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._what = ""
        self._said = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        begins = what != self._what and what.startswith(_LONG)
        if what != self._what:
            self._what, self._said = what, self._said if begins else time.monotonic()
        if not begins and time.monotonic() - self._said < _LINE_SECONDS:
            return
        self._said = time.monotonic()
        share = f": {done / total:.0%}" if total and done else ""
        self._console.print(f"{what}{share}", highlight=False, markup=False, soft_wrap=True)
