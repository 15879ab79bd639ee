"""/v1/responses: text and function calls in OpenAI's Responses API; a response may continue one that was stored."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from spillover.engine.requests.sampling_params import SamplingParams, StructuredOutputs
from spillover.server.api.answers.generation import Job, changes, collect
from spillover.server.api.answers.output_delta import Cursor, note_counts, timings, usage
from spillover.server.api.answers.response_items import Event, Items, as_messages
from spillover.server.api.answers.response_store import ResponseStore, StoredResponse, owner_of
from spillover.server.api.answers.sse import EventStream, encode, named_event
from spillover.server.api.documents import STREAMED, body_of, refusals
from spillover.server.api.errors import ApiError, as_api_error
from spillover.server.api.requests.conversation import prompt_ids
from spillover.server.api.requests.json_body import JsonBody
from spillover.server.api.requests.sampling import kv_coming, resolve_max_tokens
from spillover.server.api.tools import Delta, ToolUse, tool_use
from spillover.server.front import Front, front_of, prepare, wants_timings
from spillover.server.schemas.schemas_chat import ChatMessage, ConversationFields
from spillover.server.schemas.schemas_responses import (
    DeletedResponse,
    JsonObject,
    NamedSchema,
    ResponsesAnswer,
    ResponsesRequest,
)

router = APIRouter()


@router.post("/v1/responses", response_model=ResponsesAnswer, responses=refusals(STREAMED),
             openapi_extra=body_of(ResponsesRequest))
async def responses(http: HttpRequest,
                    body: Annotated[ResponsesRequest, Depends(JsonBody(ResponsesRequest).read)]) -> Response:
    front = front_of(http)
    model = front.model_name(body.model)
    front.require_engine()
    before = _previous(http, body.previous_response_id)
    use = tool_use(body.chat_tools(), body.chat_tool_choice(), body.parallel_tool_calls,
                   front.tokenizer.chat_template or "")
    request_id = http.scope["request_id"]
    job, messages = await prepare(http, lambda: _job(front, body, use, before, f"resp-{request_id}"), renders=True)
    note_counts(http.scope, [job])
    store = _store(http) if body.store is not False and _store(http).enabled else None
    writer = _Writer(front, body, use, job, model, request_id, wants_timings(http, body), store is not None)

    def keep(answer: dict[str, Any]) -> None:
        if store is not None:
            store.put(owner_of(http), answer["id"], encode(answer), [*messages, *writer.items.messages()])

    if body.stream:
        return EventStream(writer.stream(keep), request_id)
    answers = await collect(front, http, [job], "response")
    answer = writer.whole(answers[0].texts()[0])
    keep(answer)
    return Response(encode(answer), media_type="application/json")


@router.get("/v1/responses/{response_id}", response_model=ResponsesAnswer,
            responses=refusals(statuses=(401, 403, 404, 500)))
async def stored_response(http: HttpRequest, response_id: str) -> Response:
    stored = _store(http).get(owner_of(http), response_id)
    if stored is None:
        raise _not_found(response_id)
    return Response(stored.answer, media_type="application/json")


@router.delete("/v1/responses/{response_id}", response_model=DeletedResponse,
               responses=refusals(statuses=(401, 403, 404, 500)))
async def delete_response(http: HttpRequest, response_id: str) -> Response:
    if not _store(http).delete(owner_of(http), response_id):
        raise _not_found(response_id)
    return Response(encode({"id": response_id, "object": "response", "deleted": True}), media_type="application/json")


def _store(http: HttpRequest) -> ResponseStore:
    store: ResponseStore = http.app.state.responses
    return store


def _not_found(name: str) -> ApiError:
    return ApiError(404, f"No response '{name[:128]}' is stored here: it was deleted or evicted, or was not "
                         f"to be stored.", code="response_not_found")


def _previous(http: HttpRequest, name: str | None) -> StoredResponse | None:
    if name is None:
        return None
    stored = _store(http).get(owner_of(http), name)
    if stored is None:
        raise ApiError(400, f"No response '{name[:128]}' is stored here: it was deleted or evicted, or was "
                            f"not to be stored. Send the whole conversation as input.", "previous_response_id",
                       "previous_response_not_found")
    return stored


def _job(front: Front, body: ResponsesRequest, use: ToolUse | None, before: StoredResponse | None,
         name: str) -> tuple[Job, list[ChatMessage]]:
    """Return the job to run, and the conversation so far without instructions, which apply to one request only."""
    messages = before.messages() if before is not None else []
    if isinstance(body.input, str):
        messages.append(ChatMessage(role="user", content=body.input))
    else:
        messages += as_messages([item.model_dump() for item in body.input])
    if len(messages) > front.settings.max_messages:
        raise ApiError(400, f"the conversation has {len(messages)} messages; at most {front.settings.max_messages} are "
                            f"allowed (--max-messages)", "previous_response_id", "too_many_messages")
    system = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    structured, skip_special = _structured(body), True
    if use is not None:
        if use.constraint is not None and structured is not None:
            raise ApiError(400, "a forced tool call and a constrained answer contradict each other: give tool_choice "
                                "or text.format", "tool_choice")
        structured = use.constraint or structured
        skip_special = use.format != "mistral"  # Mistral's tool call mark is a special token
    ids = prompt_ids(front, ConversationFields(messages=[*system, *messages]), use.tools if use is not None else ())
    room = resolve_max_tokens(front.context, len(ids), body.max_output_tokens, None, "max_output_tokens", "input")
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    sent = {name: value for name in names if (value := getattr(body, name)) is not None}
    params = SamplingParams(**(front.client.factory.sampling_defaults | sent), seed=body.seed,
                            ignore_eos=bool(body.ignore_eos), max_tokens=room, structured_outputs=structured,
                            skip_special_tokens=skip_special, kv_coming=kv_coming(body.kv_transfer_params))
    return Job(front.client.factory.make(None, ids, params, body.priority or 0, body.cache_salt, name), None), messages


def _structured(body: ResponsesRequest) -> StructuredOutputs | None:
    text_format = body.text.format if body.text is not None else None
    if isinstance(text_format, NamedSchema):
        return StructuredOutputs(json=text_format.schema_, sent_as="text.format")
    return StructuredOutputs(json_object=True, sent_as="text.format") if isinstance(text_format, JsonObject) else None


class _Writer:
    """The response object in all its states, and the writer of the events that report them."""

    def __init__(self, front: Front, body: ResponsesRequest, use: ToolUse | None, job: Job, model: str,
                 request_id: str, timed: bool, stored: bool) -> None:
        self.items = Items(request_id, use.call_id if use is not None else str)
        self._front = front
        self._job = job
        self._timed = timed
        self._reader = use.reader() if use is not None else None
        self._number = 0
        text_format = body.text.format if body.text is not None else None
        self._head: dict[str, Any] = {
            "id": f"resp_{request_id}", "object": "response", "created_at": int(time.time()), "status": "in_progress",
            "model": model, "output": [], "usage": None, "error": None, "incomplete_details": None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "temperature": job.requests[0].params.temperature, "top_p": job.requests[0].params.top_p,
            "text": {"format": {"type": "text"} if text_format is None
                     else text_format.model_dump(by_alias=True, exclude_none=True)},
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            "tool_choice": "auto", "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id, "truncation": "disabled", "store": stored,
            "background": False, "metadata": body.metadata or {}, "reasoning": {"effort": None, "summary": None},
            "service_tier": "default", "top_logprobs": 0, "user": body.user,
        }
        if body.tool_choice is not None:
            self._head["tool_choice"] = (body.tool_choice if isinstance(body.tool_choice, str)
                                         else body.tool_choice.model_dump())

    def whole(self, text: str) -> dict[str, Any]:
        self._read(text, last=True)
        self.items.end(self._status())
        return self._ended()

    async def stream(self, keep: Any) -> AsyncGenerator[bytes]:
        """Stream the events. `keep` is called with the completed response."""
        cursor = Cursor(self._job.requests[0])
        begun = False
        try:
            async with aclosing(changes(self._front, [self._job], "response")) as updates:
                async for grown in updates:
                    delta = cursor.take(grown[0][1].texts()[0])
                    out = b"" if begun else self._begin()
                    begun = True
                    if delta is not None:
                        out += self._events(self._read(delta.text, cursor.ended))
                    if cursor.ended:
                        out += self._events(self.items.end(self._status()))
                        done = self._ended()
                        keep(done)
                        out += self._event(f"response.{done['status']}", {"response": done})
                    if out:
                        yield out
        except Exception as error:
            if not begun:
                raise
            api_error = as_api_error(error, self._head["id"])
            failed = self._head | {"status": "failed", "error": {"code": "server_error", "message": api_error.message}}
            yield self._event("response.failed", {"response": failed})

    def _read(self, text: str, last: bool) -> list[Event]:
        if self._reader is None:
            return self.items.add([Delta(content=text)] if text else [])
        deltas = self._reader.feed(text) if text else []
        return self.items.add([*deltas, *(self._reader.end() if last else ())])

    def _status(self) -> str:
        return "completed" if self._job.requests[0].finish_reason == "stop" else "incomplete"

    def _ended(self) -> dict[str, Any]:
        counts, status = usage([self._job]), self._status()
        done = self._head | {
            "status": status,
            "incomplete_details": None if status == "completed" else {"reason": "max_output_tokens"},
            "output": self.items.items,
            "usage": {"input_tokens": counts["prompt_tokens"],
                      "input_tokens_details": counts["prompt_tokens_details"],
                      "output_tokens": counts["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
                      "total_tokens": counts["total_tokens"]},
        }
        return done | {"timings": timings([self._job])} if self._timed else done

    def _begin(self) -> bytes:
        return self._events([(f"response.{state}", {"response": self._head}) for state in ("created", "in_progress")])

    def _events(self, events: list[Event]) -> bytes:
        return b"".join(self._event(kind, fields) for kind, fields in events)

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        made = named_event(kind, {"type": kind, "sequence_number": self._number} | fields)
        self._number += 1
        return made
