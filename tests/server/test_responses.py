"""/v1/responses with functions and with state, through OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.server.api.answers.response_store import ResponseStore
from spillover.server.schemas.schemas_chat import ChatMessage
from spillover.server.schemas.schemas_responses import ResponsesAnswer
from support.servers.running_server import Server

CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}},
                        "required": ["city"], "additionalProperties": False}
TOOLS: Any = [{"type": "function", "name": "weather", "description": "The weather in a city", "parameters": CITY},
              {"type": "function", "name": "time", "description": "The time in a city", "parameters": CITY}]
ASKED: dict[str, Any] = {"model": "default", "temperature": 0, "max_output_tokens": 60}


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.openai()


@pytest.mark.parametrize("choice", [{"type": "function", "name": "time"}, "required"])
def test_a_forced_function_is_called_whole_and_in_a_stream(client: openai.OpenAI, choice: Any) -> None:
    asked: Any = ASKED | {"input": "What time is it in Rome?", "tools": TOOLS, "tool_choice": choice}
    whole = client.responses.create(**asked)
    ResponsesAnswer.model_validate(whole.model_dump())
    call: Any = whole.output[0]
    assert (call.type, call.status, whole.status) == ("function_call", "completed", "completed")
    assert list(json.loads(call.arguments)) == ["city"]
    assert call.name in ("weather", "time") if choice == "required" else call.name == "time"
    assert [tool.name for tool in whole.tools] == ["weather", "time"]  # type: ignore[union-attr]
    events: list[Any] = list(client.responses.create(stream=True, **asked))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
    assert kinds == ["created", "in_progress", "output_item.added", "function_call_arguments.delta",
                     "function_call_arguments.done", "output_item.done", "completed"]
    deltas = "".join(event.delta for event in events if event.type.endswith("arguments.delta"))
    done: Any = events[-1].response.output[0]
    assert deltas == done.arguments == call.arguments == events[-3].arguments
    assert done.name == call.name


def test_an_output_of_a_function_goes_into_the_conversation(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASKED, input="What time is it in Rome?", tools=TOOLS,
                                    tool_choice={"type": "function", "name": "time"})
    call: Any = first.output[0]
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "It is noon in Rome."}
    chained = client.responses.create(**ASKED, input=[output], previous_response_id=first.id)
    sent: Any = [{"role": "user", "content": "What time is it in Rome?"}, call.model_dump(exclude_none=True), output]
    whole = client.responses.create(**ASKED, input=sent)
    assert chained.output_text == whole.output_text != ""
    assert chained.usage is not None
    assert whole.usage is not None
    assert chained.usage.input_tokens == whole.usage.input_tokens


def test_a_stored_response_goes_on_is_found_and_is_deleted(client: openai.OpenAI, server: Server) -> None:
    first = client.responses.create(**ASKED, input="My name is Ada.", instructions="Be brief.")
    second = client.responses.create(**ASKED, input="What is my name?", previous_response_id=first.id, stream=True)
    streamed: Any = list(second)[-1]
    sent: Any = [{"role": "user", "content": "My name is Ada."}, {"role": "assistant", "content": first.output_text},
                 {"role": "user", "content": "What is my name?"}]
    whole = client.responses.create(**ASKED, input=sent)
    assert streamed.response.output_text == whole.output_text
    assert streamed.response.previous_response_id == first.id
    assert client.responses.retrieve(streamed.response.id).output_text == whole.output_text
    client.responses.delete(first.id)
    for missing in (first.id, "resp_none"):
        with pytest.raises(openai.NotFoundError, match="is stored here"):
            client.responses.retrieve(missing)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="stored here"):
        client.responses.create(**ASKED, input="Go on.", previous_response_id=first.id)
    third = client.responses.create(**ASKED, input="Go on.", previous_response_id=streamed.response.id, store=False)
    assert third.output_text
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(third.id)
    other = httpx.get(f"{server.url}/v1/responses/{streamed.response.id}", headers={"Authorization": "Bearer other"})
    assert other.status_code == 404  # it belongs to another key


ids = st.sampled_from([f"r{i}" for i in range(6)])
steps = st.lists(st.one_of(st.tuples(st.just("put"), st.sampled_from([b"a", b"b"]), ids, st.integers(0, 400)),
                           st.tuples(st.sampled_from(["get", "delete"]), st.sampled_from([b"a", b"b"]), ids,
                                     st.just(0))), max_size=60)


@settings(max_examples=150, deadline=None)
@given(sequence=steps, limit=st.integers(0, 2000))
def test_the_store_keeps_the_latest_within_its_bytes(sequence: list[tuple[str, bytes, str, int]], limit: int) -> None:
    store = ResponseStore(limit)
    model: dict[tuple[bytes, str], int] = {}  # sizes, least recently used first
    for number, (what, owner, name, size) in enumerate(sequence):
        key = (owner, f"{name}-{number}" if what == "put" else name)
        if what == "put":
            messages = [ChatMessage(role="user", content="x" * size)]
            store.put(*key, b"{}", messages)
            model[key] = 2 + len(messages[0].model_dump_json(exclude_none=True))
            while sum(model.values()) > limit:
                del model[next(iter(model))]
        elif model:
            key = list(model)[hash((owner, name)) % len(model)]
            if what == "get":
                found = store.get(*key)
                assert found is not None
                model[key] = model.pop(key)
            else:
                assert store.delete(*key)
                del model[key]
        assert store.nbytes == sum(model.values()) <= max(limit, 0)
        assert all((store.get(*key) is not None) for key in list(model))
