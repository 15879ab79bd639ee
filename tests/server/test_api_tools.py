"""Parsing tool calls from text: each format, whole and in any pieces."""

from __future__ import annotations

import json
import random

import pytest

from spillover.server.api.tools import Call, Delta, ToolUse, format_of, read_all
from spillover.server.schemas.schemas_chat import Tool

ONE = {"name": "get_weather", "arguments": {"city": "Paris"}}
TWO = {"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}


def calls_of(*values: dict[str, object]) -> list[Call]:
    return [Call(str(value["name"]), json.dumps(value["arguments"])) for value in values]


HERMES = f"<tool_call>\n{json.dumps(ONE)}\n</tool_call>"
CASES = [
    ("hermes", f"Let me see.\n{HERMES}", "Let me see.\n", calls_of(ONE)),
    ("hermes", f"{HERMES}\n<tool_call>{json.dumps(TWO)}</tool_call>", "", calls_of(ONE, TWO)),
    ("hermes", f"<tool_call>{json.dumps(ONE)}", "", calls_of(ONE)),  # the closing tag was cut off
    ("hermes", "a < b and <tool is text", "a < b and <tool is text", []),
    ("hermes", "<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
    ("llama", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", calls_of(ONE)),
    ("llama", f'<|python_tag|>{json.dumps(ONE)}; {json.dumps(TWO)}', "", calls_of(ONE, TWO)),
    ("llama", "It is {sunny}.", "It is {sunny}.", []),
    ("llama", '{"answer": 4}', '{"answer": 4}', []),
    ("mistral", f"[TOOL_CALLS] [{json.dumps(ONE)}, {json.dumps(TWO)}]", "", calls_of(ONE, TWO)),
    ("mistral", 'Sure.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', "Sure.", calls_of(ONE)),
    ("mistral", "[TOOL is text", "[TOOL is text", []),
]


@pytest.mark.parametrize(("kind", "text", "content", "calls"), CASES)
def test_calls_are_read_whole_and_in_pieces(kind: str, text: str, content: str, calls: list[Call]) -> None:
    use = ToolUse(kind)  # type: ignore[arg-type]
    assert read_all(use.reader(), text) == (content, calls)
    chance = random.Random(0)
    for _ in range(50):
        cuts = sorted(chance.sample(range(len(text) + 1), min(6, len(text))))
        reader = use.reader()
        deltas: list[Delta] = []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            deltas += reader.feed(text[start:end])
        deltas += reader.end()
        assert "".join(delta.content for delta in deltas) == content
        assert [Call(d.name, d.arguments) for d in deltas if d.name is not None] == calls


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_forced_call_streams_its_arguments(size: int) -> None:
    text = ' {"name": "add", "arguments": {"a": 1, "b": {"c": "}"}} }'
    reader = ToolUse("hermes", True).reader()
    deltas = [delta for at in range(0, len(text), size) for delta in reader.feed(text[at:at + size])]
    assert deltas[0].name == "add"
    arguments = "".join(delta.arguments for delta in deltas)
    assert json.loads(arguments) == {"a": 1, "b": {"c": "}"}}
    assert arguments.startswith("{")


def test_one_call_where_one_is_asked_for() -> None:
    use = ToolUse("hermes", single=True)
    assert read_all(use.reader(), HERMES * 2)[1] == calls_of(ONE)


def test_the_template_tells_the_format() -> None:
    assert format_of("... [TOOL_CALLS] ...") == "mistral"
    assert format_of('... {"name": ..., "parameters": ...} <|python_tag|>') == "llama"
    assert format_of("... <tool_call> ... </tool_call>") == "hermes"
    assert format_of("{{ messages }}") == "hermes"


def test_a_required_call_may_be_of_any_tool() -> None:
    tools = tuple(Tool.model_validate({"type": "function", "function": {"name": name}}) for name in ("a", "b"))
    constraint = ToolUse("hermes", True, tools).constraint
    assert constraint is not None
    assert isinstance(constraint.json, dict)
    assert len(constraint.json["anyOf"]) == 2  # type: ignore[arg-type]


def test_half_of_a_surrogate_pair_is_replaced() -> None:
    text = '<tool_call>{"name": "say", "arguments": {"text": "a\\ud83d"}}</tool_call>'
    assert read_all(ToolUse("hermes").reader(), text) == ("", [Call("say", '{"text": "a\ufffd"}')])
