"""POST /v1/chat/completions: takes a conversation and answers with a message, whose tool calls are parsed."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from spillover.engine.output.output_processor import Answer
from spillover.server.api.answers.generation import Job, changes, collect
from spillover.server.api.answers.logprobs import chat_logprobs, prompt_rows
from spillover.server.api.answers.output_delta import Cursor, OutputDelta, note_counts, timings, usage
from spillover.server.api.answers.sse import DONE, MARK, EventStream, TextChunk, encode, event
from spillover.server.api.documents import STREAMED, body_of, refusals
from spillover.server.api.errors import ApiError
from spillover.server.api.requests.conversation import prompt_ids
from spillover.server.api.requests.json_body import JsonBody
from spillover.server.api.requests.sampling import resolve_max_tokens, sampling_params, structured_outputs
from spillover.server.api.tools import Delta, Reader, ToolUse, read_all, tool_use
from spillover.server.front import Front, front_of, prepare, wants_timings
from spillover.server.schemas.schemas_chat import ChatRequest, ChatResponse

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatResponse, responses=refusals(STREAMED),
             openapi_extra=body_of(ChatRequest))
async def chat_completions(http: HttpRequest,
                           body: Annotated[ChatRequest, Depends(JsonBody(ChatRequest).read)]) -> Response:
    front = front_of(http)
    model = front.model_name(body.model)
    front.require_engine()
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, f"top_logprobs {body.top_logprobs} needs logprobs: true", "top_logprobs")
    name = f"chatcmpl-{http.scope['request_id']}"
    use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, front.tokenizer.chat_template or "")
    job = await prepare(http, lambda: _job(front, body, use, name), renders=True)
    note_counts(http.scope, [job])
    head = {"id": name, "created": int(time.time()), "model": model}
    writer = _Writer(front, body, use, job, head, wants_timings(http, body))
    if body.stream:
        return EventStream(writer.stream(), http.scope["request_id"])
    answers = await collect(front, http, [job], "chat")
    return Response(encode(writer.whole(answers[0])), media_type="application/json")


def _job(front: Front, body: ChatRequest, use: ToolUse | None, name: str) -> Job:
    structured = structured_outputs(body)
    changes: dict[str, Any] = {}
    if use is not None:
        if use.constraint is not None and structured is not None:
            raise ApiError(400, "a forced tool call and a constrained answer contradict each other: give tool_choice "
                                "or response_format", "tool_choice")
        structured = use.constraint or structured
        if use.format == "mistral":  # Mistral's tool call mark is a special token
            changes["skip_special_tokens"] = False
    ids = prompt_ids(front, body, use.tools if use is not None else ())
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    requested: int | None = getattr(body, limit)
    if requested == 0:
        raise ApiError(400, f"{limit} must be at least 1 in a chat request; got 0", limit)
    room = resolve_max_tokens(front.context, len(ids), requested, None, limit, "messages")
    params = sampling_params(body, front.client.factory.sampling_defaults, room,
                             (body.top_logprobs or 0) if body.logprobs else None, body.prompt_logprobs, structured,
                             **changes)
    return Job(front.client.factory.make(None, ids, params, body.priority or 0, body.cache_salt, name), None)


class _Writer:
    """A writer of the answer's JSON, whole or in chunks."""

    def __init__(self, front: Front, body: ChatRequest, use: ToolUse | None, job: Job, head: dict[str, Any],
                 timed: bool) -> None:
        self._front = front
        self._body = body
        self._use = use
        self._job = job
        self._head = head
        self._timed = timed
        self._as_ids = bool(body.return_tokens_as_token_ids)
        options = body.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._each_usage = options is not None and bool(options.continuous_usage_stats)
        self._chunk_head = head | {"object": "chat.completion.chunk"} | ({"usage": None} if self._with_usage else {})
        # Most streams have only text: all of their chunk but the text is encoded once.
        self._plain = not body.logprobs and not body.return_token_ids and not self._each_usage and use is None

    def whole(self, answer: Answer) -> dict[str, Any]:
        choices = [self._choice(index, answer, text) for index, text in enumerate(answer.texts())]
        done = self._head | {"object": "chat.completion", "choices": choices, "usage": usage([self._job])}
        done |= self._about_prompt()
        return done | {"timings": timings([self._job])} if self._timed else done

    def _choice(self, index: int, answer: Answer, text: str) -> dict[str, Any]:
        request = answer.requests[index]
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        called = False
        if self._use is not None:
            message["content"], calls = read_all(self._use.reader(), text)
            if (calls or self._use.forced) and not message["content"].strip():
                message["content"] = None
            if calls:
                called = True
                message["tool_calls"] = [{"id": self._use.call_id(), "type": "function",
                                          "function": {"name": call.name, "arguments": call.arguments}}
                                         for call in calls]
        output = OutputDelta(text, request.output_token_ids, request.logprobs, request.finish_reason,
                             request.stop_reason)
        return {"index": index, "message": message, "logprobs": self._logprobs(output),
                "finish_reason": self._finish(output, called), "stop_reason": output.stop_reason,
                **({"token_ids": output.tokens} if self._body.return_token_ids else {})}

    async def stream(self) -> AsyncGenerator[bytes]:
        sequences = [_Sequence(index, Cursor(request), self._use) for index, request in enumerate(self._job.requests)]
        async with aclosing(changes(self._front, [self._job], "chat")) as updates:
            async for grown in updates:
                out = [self._chunks(*pair) for pair in zip(sequences, grown[0][1].texts(), strict=True)]
                if all(sequence.cursor.ended for sequence in sequences):
                    out.append(self._last())
                written = b"".join(out)
                if written:
                    yield written

    def _chunks(self, sequence: _Sequence, text: str) -> bytes:
        """Return the events with the new part of one sequence; empty if there is none."""
        output = sequence.cursor.take(text)
        if output is None:
            return b""
        opening = b""
        if not sequence.begun:
            sequence.begun = True
            first = _part(sequence.index, {"role": "assistant", "content": ""})
            about = self._about_prompt() if sequence.index == 0 else {}
            opening = event(self._chunk_head | {"choices": [first]} | about)
        if self._plain and output.finish_reason is None:
            return opening + (sequence.text_chunk(self._chunk_head)(output.text) if output.text else b"")
        counts = {"usage": usage([self._job])} if self._each_usage else {}
        return opening + b"".join(event(self._chunk_head | {"choices": [part]} | counts)
                                  for part in self._parts(sequence, output))

    def _parts(self, sequence: _Sequence, output: OutputDelta) -> list[dict[str, Any]]:
        """Return the choices of the chunks for an output; log probabilities and token ids are in the first chunk."""
        deltas = [{"content": output.text}] if output.text else []
        if sequence.reader is not None:
            deltas = [sequence.delta(delta) for delta in sequence.read(output)]
        parts = [_part(sequence.index, delta) for delta in deltas]
        finish = self._finish(output, sequence.calls > 0)
        if finish is not None or (not parts and (self._body.logprobs or self._body.return_token_ids)):
            parts.append(_part(sequence.index, {}))
        if finish is not None:
            parts[-1] |= {"finish_reason": finish, "stop_reason": output.stop_reason}
        if parts:
            parts[0]["logprobs"] = self._logprobs(output)
            if self._body.return_token_ids:
                parts[0]["token_ids"] = output.tokens
        return parts

    def _last(self) -> bytes:
        timed = {"timings": timings([self._job])} if self._timed else {}
        counts = {"usage": usage([self._job])} if self._with_usage else {}
        return (event(self._chunk_head | {"choices": []} | counts | timed) if counts or timed else b"") + DONE

    def _about_prompt(self) -> dict[str, Any]:
        parent = self._job.requests[0]
        more: dict[str, Any] = {}
        if self._body.return_token_ids:
            more["prompt_token_ids"] = parent.prompt_token_ids
        if self._body.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_rows(self._front.texts, [None, *parent.prompt_logprobs], self._as_ids)
        return more

    def _logprobs(self, output: OutputDelta) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._front.texts, output.tokens, output.rows, self._body.top_logprobs or 0, self._as_ids)

    def _finish(self, output: OutputDelta, called: bool) -> str | None:
        """Return OpenAI's finish reason: 'stop' if a named tool was forced, 'tool_calls' if the model chose."""
        named = self._use is not None and isinstance(self._use.forced, str)
        return "tool_calls" if called and not named and output.finish_reason == "stop" else output.finish_reason


class _Sequence:
    """One choice and how much of it was sent."""

    def __init__(self, index: int, cursor: Cursor, use: ToolUse | None) -> None:
        self.index = index
        self.cursor = cursor
        self.begun = False
        self.calls = 0
        self.reader: Reader | None = use.reader() if use is not None else None
        self._use = use
        self._text_chunk: TextChunk | None = None

    def read(self, output: OutputDelta) -> list[Delta]:
        assert self.reader is not None
        deltas = self.reader.feed(output.text) if output.text else []
        return deltas + self.reader.end() if output.finish_reason is not None else deltas

    def delta(self, delta: Delta) -> dict[str, Any]:
        if delta.content:
            return {"content": delta.content}
        if delta.name is None:
            return {"tool_calls": [{"index": self.calls - 1, "function": {"arguments": delta.arguments}}]}
        self.calls += 1
        assert self._use is not None
        return {"tool_calls": [{"index": self.calls - 1, "id": self._use.call_id(), "type": "function",
                                "function": {"name": delta.name, "arguments": delta.arguments}}]}

    def text_chunk(self, head: dict[str, Any]) -> TextChunk:
        if self._text_chunk is None:
            self._text_chunk = TextChunk(head | {"choices": [_part(self.index, {"content": MARK})]})
        return self._text_chunk


def _part(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
