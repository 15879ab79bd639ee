"""POST /v1/responses: text in, text out, in OpenAI's newer shape. No state is kept between calls."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from spillover.engine.sampling_params import SamplingParams, StructuredOutputs
from spillover.server.conversation import prompt_ids
from spillover.server.documents import STREAMED, body_of, refusals
from spillover.server.errors import as_api_error
from spillover.server.front import Front, front_of, prepare, wants_timings
from spillover.server.generation import Job, changes, collect
from spillover.server.json_body import JsonBody
from spillover.server.pieces import Cursor, note_counts, timings, usage
from spillover.server.sampling import answer_room
from spillover.server.schemas_chat import ChatMessage, ConversationFields
from spillover.server.schemas_responses import JsonObject, NamedSchema, ResponsesAnswer, ResponsesRequest
from spillover.server.sse import EventStream, encode, named_event

router = APIRouter()


@router.post("/v1/responses", response_model=ResponsesAnswer, responses=refusals(STREAMED),
             openapi_extra=body_of(ResponsesRequest))
async def responses(http: HttpRequest,
                    body: Annotated[ResponsesRequest, Depends(JsonBody(ResponsesRequest).read)]) -> Response:
    front = front_of(http)
    model = front.model_name(body.model)
    front.require_engine()
    structured = _structured(body)
    request_id = http.scope["request_id"]
    job = await prepare(http, lambda: _job(front, body, structured, f"resp-{request_id}"), renders=True)
    note_counts(http.scope, [job])
    writer = _Writer(front, body, job, model, request_id, wants_timings(http, body))
    if body.stream:
        return EventStream(writer.stream(), request_id)
    answers = await collect(front, http, [job], "response")
    return Response(encode(writer.ended(answers[0].texts()[0])), media_type="application/json")


def _job(front: Front, body: ResponsesRequest, structured: StructuredOutputs | None, name: str) -> Job:
    messages = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        messages.append(ChatMessage(role="user", content=body.input))
    else:
        messages += [ChatMessage(role=one.role, content=one.content) for one in body.input]
    ids = prompt_ids(front, ConversationFields(messages=messages))
    room = answer_room(front.context, len(ids), body.max_output_tokens, None, "max_output_tokens", "input")
    sent = {name: value for name in ("temperature", "top_p", "top_k") if (value := getattr(body, name)) is not None}
    params = SamplingParams(**(front.client.factory.sampling_defaults | sent), seed=body.seed,
                            ignore_eos=bool(body.ignore_eos), max_tokens=room, structured_outputs=structured)
    return Job(front.client.factory.make(None, ids, params, body.priority or 0, body.cache_salt, name), None)


def _structured(body: ResponsesRequest) -> StructuredOutputs | None:
    asked = body.text.format if body.text is not None else None
    if isinstance(asked, NamedSchema):
        return StructuredOutputs(json=asked.schema_, sent_as="text.format")
    return StructuredOutputs(json_object=True, sent_as="text.format") if isinstance(asked, JsonObject) else None


class _Writer:
    """The response object as it goes through its states, and the events that tell of them."""

    def __init__(self, front: Front, body: ResponsesRequest, job: Job, model: str, request_id: str,
                 timed: bool) -> None:
        self._front = front
        self._body = body
        self._job = job
        self._timed = timed
        self._item = f"msg_{request_id}"
        self._number = 0
        asked = body.text.format if body.text is not None else None
        self._head = {
            "id": f"resp_{request_id}", "object": "response", "created_at": int(time.time()), "status": "in_progress",
            "model": model, "output": [], "usage": None, "error": None, "incomplete_details": None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "temperature": job.requests[0].params.temperature, "top_p": job.requests[0].params.top_p,
            "text": {"format": asked.model_dump(by_alias=True, exclude_none=True) if asked else {"type": "text"}},
            "tools": [], "tool_choice": body.tool_choice or "auto", "parallel_tool_calls": False,
            "previous_response_id": None, "truncation": "disabled", "store": False, "background": False,
            "metadata": body.metadata if isinstance(body.metadata, dict) else {},
            "reasoning": {"effort": None, "summary": None}, "service_tier": "default", "top_logprobs": 0,
            "user": body.user if isinstance(body.user, str) else None,
        }

    def ended(self, text: str) -> dict[str, Any]:
        status = "completed" if self._job.requests[0].finish_reason == "stop" else "incomplete"
        counts = usage([self._job])
        done = self._head | {
            "status": status,
            "incomplete_details": None if status == "completed" else {"reason": "max_output_tokens"},
            "output": [self._message(status, text)],
            "usage": {"input_tokens": counts["prompt_tokens"],
                      "input_tokens_details": counts["prompt_tokens_details"],
                      "output_tokens": counts["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
                      "total_tokens": counts["total_tokens"]},
        }
        return done | {"timings": timings([self._job])} if self._timed else done

    async def stream(self) -> AsyncGenerator[bytes]:
        cursor = Cursor(self._job.requests[0])
        text, begun = "", False
        try:
            async with aclosing(changes(self._front, [self._job], "response")) as updates:
                async for grown in updates:
                    text = grown[0][1].texts()[0]
                    piece = cursor.take(text)
                    out = b"" if begun else self._begin()
                    begun = True
                    if piece is not None and piece.text:
                        out += self._event("response.output_text.delta", **self._place(), delta=piece.text, logprobs=[])
                    if cursor.ended:
                        out += self._end(text)
                    if out:
                        yield out
        except Exception as error:
            if not begun:
                raise
            told = as_api_error(error, self._item)
            failed = self._head | {"status": "failed", "error": {"code": "server_error", "message": told.message}}
            yield self._event("response.failed", response=failed)

    def _begin(self) -> bytes:
        item = self._message("in_progress", None)
        return b"".join((
            self._event("response.created", response=self._head),
            self._event("response.in_progress", response=self._head),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place(), part=_part("")),
        ))

    def _end(self, text: str) -> bytes:
        done = self.ended(text)
        return b"".join((
            self._event("response.output_text.done", **self._place(), text=text, logprobs=[]),
            self._event("response.content_part.done", **self._place(), part=_part(text)),
            self._event("response.output_item.done", output_index=0, item=done["output"][0]),
            self._event(f"response.{done['status']}", response=done),
        ))

    def _event(self, kind: str, **fields: Any) -> bytes:
        made = named_event(kind, {"type": kind, "sequence_number": self._number} | fields)
        self._number += 1
        return made

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _message(self, status: str, text: str | None) -> dict[str, Any]:
        return {"type": "message", "id": self._item, "status": status, "role": "assistant",
                "content": [] if text is None else [_part(text)]}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
