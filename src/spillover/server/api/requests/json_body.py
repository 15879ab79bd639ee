"""Request bodies: converts bytes to a validated model, within limits on their shape, whatever the fields mean.

Limits are checked first, at the speed of counting bytes; a body larger than a few KiB is parsed off the event loop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from spillover.errors import did_you_mean
from spillover.server.api.errors import ApiError, field_path, validation_error
from spillover.server.api.requests.json_scan import check_shape
from spillover.server.front import front_of, prepare

Model = TypeVar("Model", bound=BaseModel)

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NAMED_BYTES = 65_536  # in larger bodies the name of a duplicate field is not searched for
MAX_FIELDS = 2048  # maximum number of fields of one object: each may turn out to be unknown and be reported
MAX_PROBLEMS = 256  # maximum number of a body's problems that are searched for the one to report
_LISTS = ("messages", "input")  # fields whose entries are messages


class JsonBody(Generic[Model]):
    """A route's body; its `read` is a dependency that returns the body as `model`, or raises a 4xx with the reason."""

    def __init__(self, model: type[Model]) -> None:
        self.model = model

    async def read(self, request: Request) -> Model:
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            # This also keeps other sites' pages out: browsers send this type across origins only after a preflight.
            raise ApiError(415, f"the body must be application/json, not {kind[:64] or 'untyped'}; send the header "
                                f"Content-Type: application/json (curl -H 'Content-Type: application/json')",
                           code="unsupported_media_type")
        try:
            # Read as a stream, which the request does not cache, so that the bytes are freed once parsed.
            body = b"".join([chunk async for chunk in request.stream()])
        except ClientDisconnect:
            raise ApiError(499, "the client closed the connection", code="client_closed") from None
        settings = front_of(request).settings
        return await prepare(request, lambda: self._parse(body, settings.max_json_values, settings.max_messages))

    def _parse(self, body: bytes, max_values: int, max_messages: int) -> Model:
        value = parse_json(body, max_values)
        if not isinstance(value, dict):
            raise ApiError(400, f"the body must be a JSON object, not {_kind(value)}")
        for name in _LISTS:
            entries = value.get(name)
            if isinstance(entries, list) and len(entries) > max_messages:
                raise ApiError(400, f"{name} has {len(entries)} entries; at most {max_messages} are allowed "
                                    f"(--max-messages)", name, "too_many_messages")
        model = self.model_for(value)
        try:
            return model.model_validate(value)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False, include_input=False)[:MAX_PROBLEMS]
            raise _unknown_field(problems, model) or validation_error(problems) from None

    def model_for(self, value: dict[str, Any]) -> type[Model]:
        return self.model


def parse_json(body: bytes, max_values: int = 2**31) -> Any:
    """Return the value of a body; also refuse NaN, duplicate fields, lone surrogates and deep nesting."""
    shape = check_shape(body, max_values)
    try:
        value = msgspec.json.decode(body)
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not valid UTF-8") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {_reason(str(error), body)}") from None
    if _num_fields(value, shape.containers) != shape.fields:
        raise ApiError(400, f"the body is not valid JSON: {_given_twice(body)} is given twice")
    return value


def _reason(error: str, body: bytes) -> str:
    """Return why a body is not JSON: the parser's message, and the text at that position."""
    where = re.search(r"\(byte (\d+)\)", error)
    text = body[int(where[1]):][:16].decode(errors="replace") if where else ""
    pair = "; is there half of a surrogate pair (\\ud800 to \\udfff alone)?" if _SURROGATE.search(body) else ""
    return error.removeprefix("JSON is malformed: ") + (f", at '{text}'" if text else "") + pair


def _num_fields(value: Any, containers: int) -> int:
    """Return the number of fields of all objects in a value with this many objects and arrays."""
    found, seen, n = [value], 1, 0
    while found:
        one = found.pop()
        if isinstance(one, dict):
            if len(one) > MAX_FIELDS:
                raise ApiError(400, f"an object has {len(one)} fields; at most {MAX_FIELDS} are allowed")
            n += len(one)
        if seen < containers:
            inner = [entry for entry in (one.values() if isinstance(one, dict) else one)
                     if isinstance(entry, dict | list)]
            found += inner
            seen += len(inner)
    return n


def _unknown_field(problems: Sequence[ErrorDetails], model: type[BaseModel]) -> ApiError | None:
    for problem in problems:
        if problem["type"] == "extra_forbidden":
            *path, name = problem["loc"]
            where = field_path(path)
            hint = "" if where else did_you_mean(str(name), model.model_fields)
            return ApiError(400, f"unknown field '{str(name)[:64]}'{f' in {where}' if where else ''}{hint}",
                            field_path(problem["loc"]), "unknown_field")
    return None


def _given_twice(body: bytes) -> str:
    """Return the name of a field that one object of the body has twice."""
    if len(body) > _NAMED_BYTES:
        return "a field"
    names: list[str] = []

    def check_names(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        names.extend(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]

    json.loads(body, object_pairs_hook=check_names)
    return f"the field '{names[0][:64]}'"


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
