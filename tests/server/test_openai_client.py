"""The `openai` package with a real server: it behaves as with OpenAI."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pydantic
import pytest

from support.servers.running_server import Server, until

MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]}},
                   "required": ["city"], "additionalProperties": False}}}
CLOCK = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


class City(pydantic.BaseModel):
    name: str
    is_capital: bool


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai() as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_completion(client: openai.OpenAI) -> None:
    made = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0)
    assert "Paris" in made.choices[0].text
    assert made.choices[0].finish_reason == "length"
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (5, 8, 13)


def test_completions_of_several_prompts_of_each_form(client: openai.OpenAI) -> None:
    texts = client.completions.create(model="default", prompt=["One two", "Red green"], max_tokens=4, temperature=0)
    ids = [[5449, 827], [24520, 4631]]
    lists = client.completions.create(model="default", prompt=ids, max_tokens=4, n=2, seed=1)
    assert [choice.index for choice in texts.choices] == [0, 1]
    assert [choice.index for choice in lists.choices] == [0, 1, 2, 3]


def test_streamed_completion_adds_up(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=24, temperature=0)
    chunks = list(client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=24, temperature=0,
                                            stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24


def test_chat(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model=MODEL, messages=QUESTION, max_completion_tokens=16, temperature=0)
    message = made.choices[0].message
    assert message.role == "assistant"
    assert message.content is not None
    assert "Paris" in message.content
    assert message.tool_calls is None


def test_streamed_chat_adds_up_and_n_answers_come_apart(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=12, temperature=0)
    texts = ["", "", ""]
    roles = set()
    for chunk in client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=12, temperature=0, n=3,
                                                stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles.add(choice.delta.role)
    assert texts == [whole.choices[0].message.content] * 3
    assert roles == {"assistant", None}


def test_the_client_stream_helper_sees_the_events_in_order(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, max_tokens=8, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds[-1] == "content.done"
    assert final.choices[0].message.content


def test_seed_stop_and_n(client: openai.OpenAI) -> None:
    def draw(seed: int) -> list[str]:
        made = client.completions.create(model=MODEL, prompt="A", max_tokens=8, n=3, seed=seed)
        return [choice.text for choice in made.choices]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert len(set(draw(7))) > 1
    made = client.completions.create(model=MODEL, prompt="1, 2, 3, 4, 5,", max_tokens=32, temperature=0, stop=[" 8"])
    assert made.choices[0].finish_reason == "stop"
    assert "8" not in made.choices[0].text
    assert "7" in made.choices[0].text


def test_logprobs(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=4, temperature=0, logprobs=True,
                                          top_logprobs=3)
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    for entry in logprobs.content:
        assert [top.logprob for top in entry.top_logprobs] == sorted((t.logprob for t in entry.top_logprobs),
                                                                     reverse=True)
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.bytes == list(entry.token.encode())
    legacy = client.completions.create(model=MODEL, prompt="The sky is", max_tokens=3, temperature=0, logprobs=2)
    scores = legacy.choices[0].logprobs
    assert scores is not None
    assert scores.tokens is not None
    assert "".join(scores.tokens) == legacy.choices[0].text


def test_a_named_tool_is_called(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Weather in Rome?"}], tools=[CLOCK, WEATHER], temperature=0,
        tool_choice={"type": "function", "function": {"name": "get_weather"}}, max_tokens=64)
    calls = made.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.name == "get_weather"
    assert json.loads(calls[0].function.arguments)["city"] in ("Paris", "Rome", "Oslo")
    assert made.choices[0].message.content is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_and_the_way_back(client: openai.OpenAI, stream: bool) -> None:
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    asked = {"model": MODEL, "messages": messages, "tools": [WEATHER], "tool_choice": "required", "temperature": 0,
             "max_tokens": 96}
    if stream:
        with client.chat.completions.stream(**asked) as events:  # type: ignore[arg-type]
            made = events.get_final_completion()
    else:
        made = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    choice = made.choices[0]
    assert choice.finish_reason == "tool_calls"
    call = choice.message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "4 degrees, rain"}
    after = client.chat.completions.create(model=MODEL, tools=[WEATHER], max_tokens=16, temperature=0, messages=[
        *messages, choice.message.model_dump(), result])
    assert after.choices[0].message.content


def test_tools_left_to_the_model(client: openai.OpenAI) -> None:
    """A small model seldom calls tools; any output must be returned as text or as a call."""
    made = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[WEATHER], tool_choice="auto",
                                          max_tokens=48, temperature=0)
    message = made.choices[0].message
    assert message.content or message.tool_calls
    if message.tool_calls:
        assert made.choices[0].finish_reason == "tool_calls"


def test_structured_output_parses(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "Describe Paris as JSON."}], response_format=City,
        temperature=0, max_tokens=48)
    city = made.choices[0].message.parsed
    assert isinstance(city, City)
    any_json = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Give me a JSON object with a key a."}], temperature=0,
        response_format={"type": "json_object"}, max_tokens=32, extra_body={"min_p": 0.1})
    assert any_json.choices[0].finish_reason == "length" or json.loads(any_json.choices[0].message.content or "")
    chosen = client.completions.create(model=MODEL, prompt="The sky is", max_tokens=8,
                                       extra_body={"structured_outputs": {"choice": ["blue", "green"]}})
    assert chosen.choices[0].text in ("blue", "green")


def test_responses(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="Say hello.", instructions="Be brief.", temperature=0,
                                   max_output_tokens=12)
    assert made.output_text
    assert made.usage is not None
    with client.responses.stream(model=MODEL, input="Say hello.", instructions="Be brief.", temperature=0,
                                 max_output_tokens=12) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == made.output_text


def test_what_is_not_here_is_refused_in_words(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="makes no embeddings"):
        client.embeddings.create(model=MODEL, input="hello")
    with pytest.raises(openai.NotFoundError, match="'SmolLM2-135M-Instruct', 'default'") as wrong:
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    assert wrong.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="is stored here"):
        client.responses.create(model=MODEL, input="more", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model=MODEL, prompt="a", suffix="b")
    with pytest.raises(openai.BadRequestError, match="best_of"):
        client.completions.create(model=MODEL, prompt="a", best_of=3)
    with pytest.raises(openai.BadRequestError, match="context holds 1024 tokens, but 2005"):
        client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=2000)


def test_keys_and_names(guarded_server: Server) -> None:
    with guarded_server.openai() as client, guarded_server.http() as http:
        assert [model.id for model in client.models.list()] == ["first", "second"]
        made = client.completions.create(model="second", prompt=[1, 2, 3], max_tokens=4)
        assert made.model == "first"
        assert client.with_options(api_key="other").models.list().data
        for wrong in ("wrong", "righ", "right2", "RIGHT"):
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key=wrong).models.list()
        client.completions.create(model="first", prompt="shown because it was asked for", max_tokens=1)
        until(lambda: "'shown because it was asked for'" in guarded_server.log())
        http.headers.pop("Authorization")
        assert http.get("/health").status_code == http.get("/version").status_code == 200
        for path in ("/metrics", "/v1/models", "/live", "/is_sleeping"):
            assert http.get(path).status_code == 401
