"""Running a request's prompts on the engine: to the end or as they grow, and ending them when their client has gone."""

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

Grown = list[tuple[int, Answer]]  # prompts by their place in the request


@dataclass(frozen=True)
class Job:
    """One prompt of an HTTP request, ready to run."""

    requests: list[Request]  # its n sequences
    text: str | None  # as it was sent, where it was text

    @property
    def num_prompt(self) -> int:
        return self.requests[0].num_prompt


class ClientGone(ApiError):  # noqa: N818
    """Nobody is there to read the answer."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection", code="client_closed")


async def collect(front: Front, http: HttpRequest, jobs: Sequence[Job], kind: str) -> list[Answer]:
    """Return all answers, complete; the requests end at once if the client goes away."""
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
    """Return what has grown since the last time, until all have ended."""
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
                    task.result()  # raises what went wrong
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
    """Return the engine's answers to one prompt, with the recorder told of start and end."""
    record = Answer(job.requests, None, None)  # for the recorder: it watches the sequences, not their text
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
