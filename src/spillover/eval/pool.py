"""Concurrent questions: threads that each wait for one answer, so that the engine has a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from spillover.progress import counted

Question = TypeVar("Question")
Answer = TypeVar("Answer")


def answers(ask: Callable[[Question], Answer], questions: Sequence[Question], concurrency: int, what: str,
            done: int = 0) -> Iterator[tuple[Question, Answer]]:
    """Yield every question with its answer, in order of completion. A bar shows the progress; `done` were answered
    before. If closed early, it cancels pending questions and does not wait."""
    pool = ThreadPoolExecutor(concurrency, "spillover-eval")
    try:
        with counted(done + len(questions), what) as show:
            futures = {pool.submit(ask, question): question for question in questions}
            for count, future in enumerate(as_completed(futures), done + 1):
                yield futures[future], future.result()
                show(count, "")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
