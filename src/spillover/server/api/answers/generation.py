"""Runs a request's prompts on the engine, complete or streamed, and aborts them when the client has disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest

from spillover.engine.output.output_processor import Answer
from spillover.engine.requests.request import Request
from spillover.server.api.errors import ApiError
from spillover.server.front import Front

Grown = list[tuple[int, Answer]]  # the answers that have grown, by the index of their prompt in the request


@dataclass(frozen=True)
class Job:
    """One prompt of an HTTP request, ready to run."""

    requests: list[Request]  # the n sequences of the prompt
    text: str | None  # the prompt as sent; None if it was not text

    @property
    def num_prompt(self) -> int:
        return self.requests[0].num_prompt


class ClientGone(ApiError):  # noqa: N818
    """The error of a request whose client has disconnected."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection", code="client_closed")


async def collect(front: Front, http: HttpRequest, jobs: Sequence[Job], kind: str) -> list[Answer]:
    """Return all completed answers; abort the requests at once if the client disconnects."""
    work = asyncio.ensure_future(_all_answers(front, jobs, kind))
    gone = asyncio.ensure_future(disconnected(http))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGone
        return work.result()
    finally:
        gone.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait((work,))


async def changes(front: Front, jobs: Sequence[Job], kind: str) -> AsyncGenerator[Grown]:
    """Yield the answers that have grown since the last time, until all have finished."""
    if len(jobs) == 1:
        async with aclosing(_run(front, jobs[0], kind, stream=True)) as answers:
            async for answer in answers:
                yield [(0, answer)]
        return
    grown: dict[int, Answer] = {}
    wake = asyncio.Event()

    async def follow(index: int, job: Job) -> None:
        try:
            async with aclosing(_run(front, job, kind, stream=True)) as answers:
                async for answer in answers:
                    grown[index] = answer
                    wake.set()
        finally:
            wake.set()

    tasks = [asyncio.ensure_future(follow(index, job)) for index, job in enumerate(jobs)]
    try:
        while grown or not all(task.done() for task in tasks):
            await wake.wait()
            wake.clear()
            for task in tasks:
                if task.done():
                    task.result()  # raises the task's error
            if grown:
                taken = list(grown.items())
                grown.clear()
                yield taken
    finally:
        await _end(tasks)


async def disconnected(http: HttpRequest) -> None:
    """Wait until the client has closed the connection; the body must have been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _all_answers(front: Front, jobs: Sequence[Job], kind: str) -> list[Answer]:
    tasks = [asyncio.ensure_future(_last(_run(front, job, kind, stream=False))) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _last(answers: AsyncGenerator[Answer]) -> Answer:
    last: Answer | None = None
    async with aclosing(answers):
        async for answer in answers:
            last = answer
    assert last is not None
    return last


async def _run(front: Front, job: Job, kind: str, stream: bool) -> AsyncGenerator[Answer]:
    """Yield the engine's answers to one prompt, and record its start and end."""
    record = Answer(job.requests, None, None)  # for the recorder, which uses the sequences but not their text
    status = "aborted"
    front.recorder.started(record, kind)
    try:
        async with aclosing(front.client.answers(job.requests, job.text, stream=stream)) as answers:
            async for answer in answers:
                yield answer
        status = "ok"
    except Exception:
        status = "error"
        raise
    finally:
        front.recorder.finished(record, status)
