"""The accepted values of structured_outputs, and the error message for others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from spillover import SamplingParams, StructuredOutputs
from spillover.engine.structured.grammar_source import check_size, renamed
from spillover.errors import GrammarRefused, RequestError


class Person(BaseModel):
    name: str
    age: int


@pytest.mark.parametrize(("given", "same"), [
    ({"json": {"type": "integer"}}, StructuredOutputs(json={"type": "integer"})),
    ({"json": '{"type": "integer"}'}, StructuredOutputs(json='{"type": "integer"}')),
    ({"json": Person}, StructuredOutputs(json=Person.model_json_schema())),
    ({"json_object": True}, StructuredOutputs(json_object=True)),
    ({"choice": ["yes", "no"]}, StructuredOutputs(choice=("yes", "no"))),
    ({"regex": "[ab]+", "choice": None}, StructuredOutputs(regex="[ab]+")),
    (StructuredOutputs(grammar="start: /a/"), StructuredOutputs(grammar="start: /a/")),
])
def test_a_dict_and_a_pydantic_class_are_taken(given: Any, same: StructuredOutputs) -> None:
    assert SamplingParams(structured_outputs=given).structured_outputs == same


@pytest.mark.parametrize(("given", "said"), [
    ("json", "a StructuredOutputs or a dict"), (Person, "a StructuredOutputs or a dict .*got Person"),
    ({"jason": {}}, "no field 'jason'; did you mean 'json'"), ({"x": 1}, "it takes one of json, json_object, regex"),
    ({"json": 5}, "pydantic model class; got int '5'"), ({"json": Person(name="a", age=1)}, "pydantic model class"),
    ({"regex": 5}, "regex is a string"), ({"choice": "yes"}, r"choice is a list of strings, such as \['yes', 'no'\]"),
    ({"choice": [1]}, "non-empty string"), ({}, "exactly one"), ({"regex": "a", "choice": ["b"]}, "exactly one"),
])
def test_anything_else_is_refused_in_a_sentence(given: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        SamplingParams(structured_outputs=given)


def test_a_refusal_has_the_name_of_the_field_that_was_sent() -> None:
    outputs = StructuredOutputs(json=json.dumps({"enum": list(range(99_999))}), sent_as="response_format")
    with pytest.raises(GrammarRefused) as refusal:
        check_size(outputs)
    assert str(renamed(refusal.value, outputs)).startswith("response_format has ")
