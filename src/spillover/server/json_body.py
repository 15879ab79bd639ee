"""Request bodies: bytes to a checked model, with limits on what may come in. Nothing here knows what it means."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from spillover.server.errors import ApiError, field_path, validation_error
from spillover.server.front import front_of

Model = TypeVar("Model", bound=BaseModel)

MAX_DEPTH = 128
# Matches also a string that never ends, and never gives back: a search over any text takes time linear in it.
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_LARGE = 256 * 1024  # bytes; parsing more than this is left to a thread


class JsonBody(Generic[Model]):
    """`read` is a dependency: the request's body as `model`, or a 4xx that says what is wrong with it."""

    def __init__(self, model: type[Model]) -> None:
        self.model = model

    async def read(self, request: Request) -> Model:
        kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
        if kind != "application/json":
            # Also keeps other sites' pages out: a browser sends this type across origins only after asking.
            raise ApiError(415, f"the body must be application/json, not {kind or 'untyped'}; "
                                f"send the header Content-Type: application/json")
        try:
            body = await request.body()
        except ClientDisconnect:
            raise ApiError(499, "the client closed the connection", code="client_closed") from None
        if len(body) <= _LARGE:
            return self._parse(body)
        return await front_of(request).in_thread(self._parse, body)

    def _parse(self, body: bytes) -> Model:
        value = parse_json(body)
        if not isinstance(value, dict):
            raise ApiError(400, f"the body must be a JSON object, not {_kind(value)}")
        model = self.model_for(value)
        try:
            return model.model_validate(value)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False, include_input=False)
            raise _unknown_field(problems, model) or validation_error(problems) from None

    def model_for(self, value: dict[str, Any]) -> type[Model]:
        return self.model


def parse_json(body: bytes) -> Any:
    """Stricter than the standard library: no NaN or Infinity, no field twice, no lone surrogate, no deep nesting."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8 (byte {error.start})") from None
    check_depth(text)
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ApiError(400, "the body has half of a surrogate pair (\\ud800 to \\udfff alone)") from None
    return value


def check_depth(text: str) -> None:
    depth = 0
    for match in _BRACKET.finditer(_STRING.sub("", text)):
        depth += 1 if match[0] in "[{" else -1
        if depth > MAX_DEPTH:
            raise ApiError(400, f"the body is nested more than {MAX_DEPTH} deep")


def nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _unknown_field(problems: Sequence[ErrorDetails], model: type[BaseModel]) -> ApiError | None:
    for problem in problems:
        if problem["type"] == "extra_forbidden":
            *path, name = problem["loc"]
            where = field_path(path)
            hint = "" if where else nearest(str(name), list(model.model_fields))
            return ApiError(400, f"unknown field '{str(name)[:64]}'{f' in {where}' if where else ''}{hint}",
                            field_path(problem["loc"]), "unknown_field")
    return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the field '{twice[:64]}' is given twice")
    return made


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:32]} is too large")
    return value


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
