"""Conversion of a request's structured_outputs to the source that llguidance compiles, with limits on its size."""

from __future__ import annotations

import json
from collections.abc import Iterator

import llguidance
from llguidance import LLMatcher

from spillover.engine.requests.sampling_params import StructuredOutputs
from spillover.errors import GrammarRefused

MAX_SCHEMA_BYTES = 256 * 1024
MAX_GRAMMAR_BYTES = 64 * 1024  # smaller than for schemas: a rule takes only a few bytes, and rules may be chained
MAX_REGEX_BYTES = 16 * 1024  # smaller still: compile time is quadratic in the number of optional parts
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_NODES = 32_768  # keys, enum entries and array items
MAX_SCHEMA_REFERENCES = 512

# Bounded, as a model may otherwise write whitespace without end.
_JSON_BLANKS = r"[\x20\x0A\x0D\x09]{1,100}"


def check_size(outputs: StructuredOutputs) -> None:
    """Raise GrammarRefused for sources that are too large to try, before any time is spent on compiling."""
    if outputs.json is not None:
        _checked_schema(outputs.json)
    elif outputs.choice is not None:
        _check_length("choice", sum(map(len, outputs.choice)), MAX_GRAMMAR_BYTES)
    elif outputs.regex is not None:
        _check_length("regex", len(outputs.regex), MAX_REGEX_BYTES)
    elif outputs.grammar is not None:
        _check_length("grammar", len(outputs.grammar), MAX_GRAMMAR_BYTES)


def renamed(refusal: GrammarRefused, outputs: StructuredOutputs) -> GrammarRefused:
    """Return the refusal with the field named as the caller sent it (`sent_as`)."""
    if outputs.sent_as is None:
        return refusal
    own = f"structured_outputs.{kind_of(outputs)}"
    return GrammarRefused(str(refusal).replace(own, outputs.sent_as), refusal.reason)


def source_of(outputs: StructuredOutputs) -> str:
    """Return the source that llguidance compiles, in its JSON format."""
    if outputs.json is not None:
        return _grammar_of_schema(_checked_schema(outputs.json))
    check_size(outputs)
    if outputs.json_object:
        return _grammar_of_schema({"type": "object"})
    if outputs.choice is not None:
        text = "|".join("".join(f"\\x{{{ord(letter):x}}}" for letter in choice) for choice in outputs.choice)
        return str(LLMatcher.grammar_from_regex(f"(?:{text})"))
    if outputs.regex is not None:
        return str(LLMatcher.grammar_from_regex(outputs.regex))
    assert outputs.grammar is not None
    try:
        return str(llguidance.grammar_from("grammar", outputs.grammar))  # Lark or GBNF
    except ValueError as error:
        raise does_not_compile("grammar", str(error)) from error


def kind_of(outputs: StructuredOutputs) -> str:
    return next(name for name in ("json", "json_object", "regex", "grammar", "choice")
                if getattr(outputs, name) not in (None, False))


def does_not_compile(kind: str, message: str) -> GrammarRefused:
    """Return the refusal with the compiler's message, whose long quotes from the source are shortened."""
    lines = [line if len(line) <= 160 else line[:157] + "..." for line in message.strip().splitlines()[:8]]
    return GrammarRefused(f"structured_outputs.{kind} does not compile: " + "\n".join(lines), "invalid")


def _grammar_of_schema(schema: object) -> str:
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_pattern": _JSON_BLANKS}))


def _checked_schema(schema: str | dict[str, object]) -> object:
    if isinstance(schema, str):
        _check_length("json", len(schema), MAX_SCHEMA_BYTES)
        try:
            parsed: object = json.loads(schema)
        except RecursionError:
            raise _too_deep() from None
        except ValueError as error:
            raise GrammarRefused(f"structured_outputs.json is not valid JSON: {error}", "invalid") from error
    else:
        parsed = schema
    if not isinstance(parsed, dict):
        raise GrammarRefused("structured_outputs.json must be a JSON schema object", "invalid")
    references = set()
    for nodes, (depth, key, value) in enumerate(_walk(parsed)):
        if depth > MAX_SCHEMA_DEPTH:
            raise _too_deep()
        if nodes >= MAX_SCHEMA_NODES:
            raise GrammarRefused(f"structured_outputs.json has more than {MAX_SCHEMA_NODES} keys, enum entries and "
                                 "array items; use a pattern, or fewer of them", "size")
        if key in ("$ref", "$dynamicRef") and isinstance(value, str):
            references.add(value)
    if len(references) > MAX_SCHEMA_REFERENCES:
        raise GrammarRefused(f"structured_outputs.json refers to {len(references)} definitions; at most "
                             f"{MAX_SCHEMA_REFERENCES} are allowed", "size")
    try:
        _check_length("json", len(json.dumps(parsed)), MAX_SCHEMA_BYTES)
    except (TypeError, ValueError) as error:
        raise GrammarRefused(f"structured_outputs.json is not a JSON schema: {error}", "invalid") from error
    return parsed


def _too_deep() -> GrammarRefused:
    return GrammarRefused(f"structured_outputs.json is nested more than {MAX_SCHEMA_DEPTH} deep; "
                          "move inner parts to $defs and refer to them with $ref", "size")


def _walk(schema: dict[str, object]) -> Iterator[tuple[int, object, object]]:
    """Yield every (depth, key, value), without recursion."""
    stack: list[tuple[int, object]] = [(1, schema)]
    while stack:
        depth, node = stack.pop()
        pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list | tuple) else ()
        for key, value in pairs:
            yield depth, key, value
            stack.append((depth + 1, value))


def _check_length(kind: str, length: int, limit: int) -> None:
    if length > limit:
        raise GrammarRefused(f"structured_outputs.{kind} has {length} characters; at most {limit} are allowed", "size")
