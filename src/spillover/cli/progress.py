"""A progress bar over bytes, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


@contextmanager
def bytes_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Appears with the first report, so that nothing is drawn where nothing happens; silent where stderr is a file."""
    console = Console(stderr=True)
    bar = Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
                   TransferSpeedColumn(), console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("", total=None)

    def show(what: str, done: int, total: int) -> None:
        if not bar.live.is_started:
            bar.start()
        bar.update(task, description=what, completed=done, total=total)

    try:
        yield show
    finally:
        bar.stop()
