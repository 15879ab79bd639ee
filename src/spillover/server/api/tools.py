"""Tool calls: how tools are described to a model, how a call is forced, and how calls are parsed from its text.

Three formats are parsed: Hermes and Qwen (<tool_call>{...}</tool_call>), Llama 3 ({"name": ..., "parameters": ...}) and
Mistral ([TOOL_CALLS]...). The model's chat template determines its format.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from spillover.engine.requests.sampling_params import StructuredOutputs
from spillover.server.api.errors import ApiError
from spillover.server.schemas.schemas_chat import NamedToolChoice, Tool

Format = Literal["hermes", "llama", "mistral"]

_DECODER = json.JSONDecoder()
_CALL_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')
_MISTRAL_NAME = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\])?\s*(?=\{)")
_HERMES_OPEN, _HERMES_CLOSE = "<tool_call>", "</tool_call>"
_MISTRAL_MARK, _PYTHON_TAG = "[TOOL_CALLS]", "<|python_tag|>"


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # JSON


@dataclass(frozen=True)
class Delta:
    """The next part of an answer: text, the start of a call, or more arguments of the last call."""

    content: str = ""
    name: str | None = None
    arguments: str = ""


class Reader(Protocol):
    """A parser of an answer's growing text, which separates text from calls."""

    def feed(self, text: str) -> list[Delta]: ...
    def end(self) -> list[Delta]: ...


@dataclass(frozen=True)
class ToolUse:
    """The tools of a chat request, and how they are to be used."""

    format: Format
    forced: str | Literal[True] | None = None  # a tool's name; True for any tool; None if the model decides
    tools: tuple[Tool, ...] = ()
    single: bool = False  # parallel_tool_calls: false

    @property
    def constraint(self) -> StructuredOutputs | None:
        """Return the grammar that forces a call: the arguments of a named tool, or a complete call of any tool."""
        if self.forced is None:
            return None
        if isinstance(self.forced, str):
            return StructuredOutputs(json=_parameters(next(t for t in self.tools if t.function.name == self.forced)),
                                     sent_as="tools")
        calls = [{"type": "object", "properties": {"name": {"const": tool.function.name},
                                                   "arguments": _parameters(tool)},
                  "required": ["name", "arguments"], "additionalProperties": False} for tool in self.tools]
        return StructuredOutputs(json=calls[0] if len(calls) == 1 else {"anyOf": calls}, sent_as="tools")

    def reader(self) -> Reader:
        if isinstance(self.forced, str):
            return _Arguments(self.forced)
        if self.forced:
            return _WholeCall()
        return _Marked(self.format, self.single)

    def call_id(self) -> str:
        letters = string.ascii_letters + string.digits
        if self.format == "mistral":  # Mistral's template refuses other lengths
            return "".join(secrets.choice(letters) for _ in range(9))
        return "call_" + "".join(secrets.choice(letters) for _ in range(24))


def tool_use(tools: Sequence[Tool] | None, choice: str | NamedToolChoice | None, parallel: bool | None,
             template: str) -> ToolUse | None:
    """Return the tools of a request; None if it uses none. `choice` and `parallel` are the chat request's fields."""
    if not tools:
        if choice == "required" or isinstance(choice, NamedToolChoice):
            raise ApiError(400, "tool_choice requires a call, but the request has no tools: add some", "tool_choice")
        return None
    if choice == "none":
        return None
    names = [tool.function.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ApiError(400, f"tools has several functions named '{twice}': give each its own name", "tools")
    forced: str | Literal[True] | None = True if choice == "required" else None
    if isinstance(choice, NamedToolChoice):
        forced = choice.function.name
        if forced not in names:
            raise ApiError(400, f"tool_choice names '{forced}', but tools has {', '.join(names)}", "tool_choice")
    return ToolUse(format_of(template), forced, tuple(tools), parallel is False)


def format_of(template: str) -> Format:
    if _MISTRAL_MARK in template:
        return "mistral"
    if _HERMES_OPEN not in template and (_PYTHON_TAG in template or '"parameters": ' in template):
        return "llama"
    return "hermes"


def knows_tools(template: str) -> bool:
    return "tools" in template


def described(tools: Sequence[Tool]) -> str:
    """Describe tools to a model whose template ignores them, in the format of Hermes, which many are trained on."""
    lines = "\n".join(json.dumps(tool.model_dump(exclude_none=True), ensure_ascii=False) for tool in tools)
    return ("You may call one or more functions to assist with the user query.\n\nYou are provided with function "
            f"signatures within <tools></tools> XML tags:\n<tools>\n{lines}\n</tools>\n\nFor each function call, "
            "return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>')


def written_calls(calls: Sequence[dict[str, Any]]) -> str:
    """Return earlier calls as a model whose template ignores tools would have written them."""
    return "\n".join(f"{_HERMES_OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{_HERMES_CLOSE}"
                     for call in calls)


def read_all(reader: Reader, text: str) -> tuple[str, list[Call]]:
    """Return the text and the calls of a complete answer."""
    content, calls = "", []
    for delta in [*reader.feed(text), *reader.end()]:
        content += delta.content
        if delta.name is not None:
            calls.append(Call(delta.name, delta.arguments))
        elif delta.arguments:
            calls[-1] = Call(calls[-1].name, calls[-1].arguments + delta.arguments)
    return content, calls


class _Arguments:
    """A reader for a forced named tool: the text is its arguments."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str) -> list[Delta]:
        name, self._name = self._name, None
        return [Delta(name=name, arguments=text)] if text or name else []

    def end(self) -> list[Delta]:
        return []


class _WholeCall:
    """A reader for a forced call of any tool: the text is {"name": ..., "arguments": ...}."""

    def __init__(self) -> None:
        self._text = ""
        self._begun = False
        self._blank = False  # only blanks of the arguments so far

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        name = None
        if not self._begun:
            head = _CALL_HEAD.match(self._text)
            if head is None:
                return []
            self._begun, self._text, name = True, self._text[head.end():], json.loads(head[1])
            self._blank = True
        if self._blank:
            self._text = self._text.lstrip()
            self._blank = not self._text
        # The last brace closes the call, not the arguments.
        keep = len(self._text.rstrip().removesuffix("}").rstrip())
        new, self._text = self._text[:keep], self._text[keep:]
        return [Delta(name=name, arguments=new)] if new or name else []

    def end(self) -> list[Delta]:
        return []


class _Marked:
    """A reader for optional calls: text before a mark is content; text after it is calls if it can be parsed."""

    def __init__(self, format: Format, single: bool) -> None:
        self._format = format
        self._single = single
        self._calls = 0
        self._held = ""
        self._inside = False
        self._blank = True  # only blanks so far

    def feed(self, text: str) -> list[Delta]:
        self._held += text
        out: list[Delta] = []
        while True:
            if not self._inside:
                out += self._before_mark()
            if not self._inside or self._format != "hermes" or _HERMES_CLOSE not in self._held:
                return out
            inside, _, rest = self._held.partition(_HERMES_CLOSE)
            out += self._read(inside + _HERMES_CLOSE)
            self._held, self._inside = rest, False

    def end(self) -> list[Delta]:
        held, self._held = self._held, ""
        if not self._inside:
            return self._show(held)
        return self._read(held)

    def _before_mark(self) -> list[Delta]:
        """Return the text that cannot be part of a mark, up to a complete mark."""
        start, length = self._find_mark()
        shown, self._held = self._held[:start], self._held[start:]
        self._inside = length > 0
        return self._show(shown)

    def _find_mark(self) -> tuple[int, int]:
        """Return the start and length of a mark; length 0 if only its beginning may have arrived."""
        if self._format == "llama":
            if not self._blank:
                return len(self._held), 0
            stripped = self._held.lstrip()
            start = len(self._held) - len(stripped)
            if stripped.startswith(("{", _PYTHON_TAG)):
                return start, 1
            return (start, 0) if not stripped or _PYTHON_TAG.startswith(stripped) else (len(self._held), 0)
        mark = _HERMES_OPEN if self._format == "hermes" else _MISTRAL_MARK
        at = self._held.find(mark)
        if at >= 0:
            return at, len(mark)
        for length in range(min(len(mark) - 1, len(self._held)), 0, -1):
            if mark.startswith(self._held[-length:]):
                return len(self._held) - length, 0
        return len(self._held), 0

    def _show(self, text: str) -> list[Delta]:
        # Blanks between calls are not part of the answer.
        if not text or (self._calls and not text.strip()):
            return []
        self._blank = self._blank and not text.strip()
        return [Delta(content=text)]

    def _read(self, text: str) -> list[Delta]:
        read = {"hermes": _hermes, "llama": _llama, "mistral": _mistral}[self._format](text)
        if read is None:
            return self._show(text)
        if self._single:
            read = read[:1 - min(self._calls, 1)]
        self._calls += len(read)
        return [Delta(name=call.name, arguments=call.arguments) for call in read]


def _hermes(text: str) -> list[Call] | None:
    call = _call(_json_at(text, len(_HERMES_OPEN))[0])
    return None if call is None else [call]


def _llama(text: str) -> list[Call] | None:
    at = len(_PYTHON_TAG) if text.startswith(_PYTHON_TAG) else 0
    calls: list[Call] = []
    while at < len(text):
        value, end = _json_at(text, at)
        call = _call(value)
        if call is None:
            return None
        calls.append(call)
        at = end
        while at < len(text) and text[at] in "; \n\t":
            at += 1
    return calls or None


def _mistral(text: str) -> list[Call] | None:
    calls: list[Call] = []
    for part in text.split(_MISTRAL_MARK)[1:]:
        named = _MISTRAL_NAME.match(part)
        if named is not None:
            values: list[Any] = [{"name": named[1], "arguments": _json_at(part, named.end())[0]}]
        else:
            value, _ = _json_at(part, 0)
            values = value if isinstance(value, list) else [value]
        read = [_call(value) for value in values]
        calls += [call for call in read if call is not None]
        if not values or None in read:
            return None
    return calls or None


def _json_at(text: str, start: int) -> tuple[Any, int]:
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start


def _call(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return Call(_whole(value["name"]), _whole(arguments))
    if not isinstance(arguments, dict):
        return None
    return Call(_whole(value["name"]), _whole(json.dumps(arguments, ensure_ascii=False)))


def _whole(text: str) -> str:
    """Return text with U+FFFD for each lone half of a surrogate pair, which a model may write as an escape."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
