"""The new parts of a growing answer, and its final counts and times: shared by all three generating routes."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spillover.engine.output.outputs import PositionLogprobs, TokenSources
from spillover.engine.requests.request import Request
from spillover.server.api.answers.generation import Job


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What a sequence gained since the part of it that was sent last, or the whole of it if nothing was sent."""

    text: str
    tokens: list[int]
    rows: list[PositionLogprobs]
    finish_reason: str | None
    stop_reason: int | str | None


class Cursor:
    """The position up to which one sequence has been sent."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._tokens = request.num_prompt
        self._rows = 0
        self._characters = 0
        self.ended = False

    def take(self, text: str) -> OutputDelta | None:
        """Return the part added since the last call; None if there is none. `text` is the whole text so far."""
        request = self._request
        if self.ended or (len(request.token_ids) == self._tokens and request.finish_reason is None):
            return None
        delta = OutputDelta(text[self._characters:], request.token_ids[self._tokens:].tolist(),
                            request.logprobs[self._rows:], request.finish_reason, request.stop_reason)
        self._tokens = len(request.token_ids)
        self._rows = len(request.logprobs)
        self._characters = len(text)
        self.ended = request.finish_reason is not None
        return delta


def usage(jobs: Sequence[Job], dropped: bool = False) -> dict[str, Any]:
    """Return the usage. With `dropped`, the one token sampled for an answer of zero tokens is not counted."""
    prompt = sum(job.num_prompt for job in jobs)
    output = 0 if dropped else sum(len(r.token_ids) - r.num_prompt for job in jobs for r in job.requests)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached_tokens(jobs)}}


def cached_tokens(jobs: Sequence[Job]) -> int:
    return sum(_sources(job).cached for job in jobs)


def timings(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Return one entry per prompt, in their order."""
    rows = []
    for job in jobs:
        times, sources = job.requests[0].timings, _sources(job)
        last = max(request.finished for request in job.requests)
        rows.append({
            "queue": times.queue, "restore": times.restore, "prefill": times.prefill,
            "decode": last - times.first_token,
            "tokens": asdict(sources),
        })
    return rows


def note_counts(scope: MutableMapping[str, Any], jobs: Sequence[Job]) -> None:
    """Store the jobs for the request's log line and metrics, and release its body, whose prompts are tokens now."""
    scope["spillover.jobs"] = jobs
    scope["spillover.release_body"]()


def _sources(job: Job) -> TokenSources:
    return job.requests[0].sources or TokenSources()
