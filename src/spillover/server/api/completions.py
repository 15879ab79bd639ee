"""POST /v1/completions: takes text or token ids, answers with text; echo and log probabilities are for evaluations."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from spillover.engine.output.output_processor import Answer
from spillover.engine.output.outputs import PositionLogprobs
from spillover.server.api.answers.generation import Job, changes, collect
from spillover.server.api.answers.logprobs import legacy_logprobs, prompt_rows
from spillover.server.api.answers.output_delta import Cursor, OutputDelta, note_counts, timings, usage
from spillover.server.api.answers.sse import DONE, MARK, EventStream, TextChunk, encode, event
from spillover.server.api.answers.token_text import TextOffsets
from spillover.server.api.documents import STREAMED, body_of, refusals
from spillover.server.api.errors import ApiError
from spillover.server.api.requests.json_body import JsonBody
from spillover.server.api.requests.sampling import resolve_max_tokens, sampling_params, structured_outputs
from spillover.server.front import Front, front_of, prepare, wants_timings
from spillover.server.schemas.schemas_completions import CompletionRequest, CompletionResponse

DEFAULT_MAX_TOKENS = 16

router = APIRouter()


@router.post("/v1/completions", response_model=CompletionResponse, responses=refusals(STREAMED),
             openapi_extra=body_of(CompletionRequest))
async def completions(http: HttpRequest,
                      body: Annotated[CompletionRequest, Depends(JsonBody(CompletionRequest).read)]) -> Response:
    front = front_of(http)
    model = front.model_name(body.model)
    front.require_engine()
    if body.best_of not in (None, body.n or 1):
        raise ApiError(400, f"best_of ({body.best_of}) must be the same as n ({body.n or 1}): every sequence is "
                            f"returned", "best_of")
    name = f"cmpl-{http.scope['request_id']}"
    jobs = await prepare(http, lambda: _jobs(front, body, name))
    note_counts(http.scope, jobs)
    writer = _Writer(front, body, jobs, {"id": name, "object": "text_completion", "created": int(time.time()),
                                         "model": model}, wants_timings(http, body))
    if body.stream:
        return EventStream(writer.stream(), http.scope["request_id"])
    answers = await collect(front, http, jobs, "completion")
    return Response(encode(writer.whole(answers)), media_type="application/json")


def _jobs(front: Front, body: CompletionRequest, name: str) -> list[Job]:
    prompts = _prompts(body)
    wanted = len(prompts) * (body.n or 1)
    limit = front.settings.max_queue + front.client.info.plan.max_num_seqs
    if wanted > limit:
        raise ApiError(400, f"{len(prompts)} prompts with n={body.n or 1} are {wanted} sequences, but at most {limit} "
                            f"can run and wait together (--max-num-seqs and --max-queue)", "prompt")
    structured = structured_outputs(body)
    scored = [k for k in (body.prompt_logprobs, body.logprobs if body.echo else None) if k is not None]
    jobs = []
    for index, prompt in enumerate(prompts):
        special = body.add_special_tokens is not False
        if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
            front.check_length(prompt)
        ids = front.tokenizer.encode(prompt, special) if isinstance(prompt, str) else prompt
        if body.truncate_prompt_tokens is not None:
            ids = ids[-body.truncate_prompt_tokens:]
        room = resolve_max_tokens(front.context, len(ids), body.max_tokens, DEFAULT_MAX_TOKENS, "max_tokens", "prompt")
        params = sampling_params(body, front.client.factory.sampling_defaults, max(room, 1), body.logprobs,
                                 max(scored, default=None), structured)
        jobs.append(Job(front.client.factory.make(None, ids, params, body.priority or 0, body.cache_salt,
                                                  name if len(prompts) == 1 else f"{name}-{index}"),
                        prompt if isinstance(prompt, str) and body.truncate_prompt_tokens is None else None))
    return jobs


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    prompt: Any = body.prompt
    several = isinstance(prompt, list) and isinstance(prompt[0], str | list)
    return prompt if several else [prompt]


class _Writer:
    """A writer of the answer's JSON, whole or in chunks."""

    def __init__(self, front: Front, body: CompletionRequest, jobs: list[Job], head: dict[str, Any],
                 timed: bool) -> None:
        self._front = front
        self._body = body
        self._jobs = jobs
        self._head = head
        self._timed = timed
        self._n = body.n or 1
        self._dropped = body.max_tokens == 0  # the engine samples at least one token; it is not returned
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._skip_special = body.skip_special_tokens is not False
        options = body.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._each_usage = options is not None and bool(options.continuous_usage_stats)
        self._chunk_head = head | ({"usage": None} if self._with_usage else {})
        # Most streams have only text: all of their chunk but the text is encoded once.
        self._plain = body.logprobs is None and not body.return_token_ids and not self._each_usage

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        choices = [self._choice(job, place, answer, answer.texts()[place])
                   for job, answer in zip(self._jobs, answers, strict=True) for place in range(self._n)]
        for index, choice in enumerate(choices):
            choice["index"] = index
        done = self._head | {"choices": choices, "usage": usage(self._jobs, self._dropped)}
        return done | {"timings": timings(self._jobs)} if self._timed else done

    def _choice(self, job: Job, place: int, answer: Answer, text: str) -> dict[str, Any]:
        body, request = self._body, answer.requests[place]
        delta = OutputDelta(text, request.output_token_ids, list(request.logprobs), request.finish_reason,
                            request.stop_reason)
        choice = self._part(job, delta, self._offsets(), begins=True)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._vllm_rows(job)
        return choice

    def _part(self, job: Job, delta: OutputDelta, offsets: TextOffsets, begins: bool) -> dict[str, Any]:
        """Return a choice, or its next part; the echoed prompt is in the first part."""
        body = self._body
        echoed = job.requests[0].prompt_token_ids if begins and body.echo else []
        drawn = [] if self._dropped else delta.tokens
        text = "" if self._dropped else delta.text
        part: dict[str, Any] = {"index": 0, "text": self._echo(job) + text if begins and body.echo else text,
                                "logprobs": None,
                                "finish_reason": "length" if self._dropped else delta.finish_reason,
                                "stop_reason": None if self._dropped else delta.stop_reason}
        if body.logprobs is not None:
            rows: list[PositionLogprobs | None] = [*(self._prompt_rows(job) if echoed else []),
                                                   *([] if self._dropped else delta.rows)]
            part["logprobs"] = legacy_logprobs(self._front.texts, offsets, [*echoed, *drawn], rows, body.logprobs,
                                               self._as_ids)
        if body.return_token_ids:
            part["token_ids"] = drawn
            if begins:
                part["prompt_token_ids"] = job.requests[0].prompt_token_ids
        return part

    async def stream(self) -> AsyncGenerator[bytes]:
        sequences = [_Sequence(index, job, Cursor(request), self._offsets())
                     for index, (job, request) in enumerate((j, r) for j in self._jobs for r in j.requests)]
        async with aclosing(changes(self._front, self._jobs, "completion")) as updates:
            async for grown in updates:
                out = []
                for place, answer in grown:
                    own = sequences[place * self._n:(place + 1) * self._n]
                    out += [self._chunk(*pair) for pair in zip(own, answer.texts(), strict=True)]
                if all(sequence.cursor.ended for sequence in sequences):
                    out.append(self._last())
                written = b"".join(out)
                if written:
                    yield written

    def _chunk(self, sequence: _Sequence, text: str) -> bytes:
        """Return the event with the new part of one sequence; empty if there is none."""
        delta = sequence.cursor.take(text)
        if delta is None or (self._dropped and delta.finish_reason is None):
            return b""
        begins, sequence.begun = not sequence.begun, True
        if self._plain and delta.finish_reason is None and not (begins and self._body.echo):
            return sequence.text_chunk(self._chunk_head)(delta.text) if delta.text or begins else b""
        part = self._part(sequence.job, delta, sequence.offsets, begins) | {"index": sequence.index}
        if begins and self._body.prompt_logprobs is not None:
            part["prompt_logprobs"] = self._vllm_rows(sequence.job)
        counts = {"usage": usage(self._jobs, self._dropped)} if self._each_usage else {}
        return event(self._chunk_head | {"choices": [part]} | counts)

    def _last(self) -> bytes:
        timed = {"timings": timings(self._jobs)} if self._timed else {}
        counts = {"usage": usage(self._jobs, self._dropped)} if self._with_usage else {}
        return (event(self._head | {"choices": []} | counts | timed) if counts or timed else b"") + DONE

    def _echo(self, job: Job) -> str:
        return job.text if job.text is not None else self._front.tokenizer.decode(
            job.requests[0].prompt_token_ids, self._skip_special)

    def _offsets(self) -> TextOffsets:
        return TextOffsets(self._front.texts, self._skip_special)

    def _vllm_rows(self, job: Job) -> list[dict[str, Any] | None]:
        return prompt_rows(self._front.texts, self._prompt_rows(job), self._as_ids)

    def _prompt_rows(self, job: Job) -> list[PositionLogprobs | None]:
        """Return one entry per prompt token; the first is None, as nothing predicts it."""
        return [None, *job.requests[0].prompt_logprobs]


class _Sequence:
    """One choice and how much of it was sent."""

    def __init__(self, index: int, job: Job, cursor: Cursor, offsets: TextOffsets) -> None:
        self.index = index
        self.job = job
        self.cursor = cursor
        self.offsets = offsets
        self.begun = False
        self._text_chunk: TextChunk | None = None

    def text_chunk(self, head: dict[str, Any]) -> TextChunk:
        if self._text_chunk is None:
            self._text_chunk = TextChunk(head | {"choices": [{"index": self.index, "text": MARK, "logprobs": None,
                                                              "finish_reason": None, "stop_reason": None}]})
        return self._text_chunk
