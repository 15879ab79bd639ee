"""The official Python client, unchanged but for its base URL, finds everything where it expects it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel
from server_process import ServerProcess

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}},
                   "required": ["city"], "additionalProperties": False}}}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as opened:
        yield opened


def test_models_are_listed_and_any_of_their_names_answers(client: OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert names
    for name in [*names, "default"]:
        assert client.completions.create(model=name, prompt="One, two,", max_tokens=2).choices[0].text


def test_a_completion_counts_its_tokens(client: OpenAI) -> None:
    answer = client.completions.create(model="default", prompt="One, two, three,", max_tokens=5, temperature=0)
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5
    assert answer.choices[0].finish_reason == "length"
    assert "four" in answer.choices[0].text


def test_many_prompts_and_many_answers_come_back_in_order(client: OpenAI) -> None:
    prompts = ["One, two, three,", "The capital of France is"]
    answer = client.completions.create(model="default", prompt=prompts, n=2, max_tokens=4, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in answer.choices]
    assert texts[0] == texts[1]
    assert "Paris" in texts[2]


def test_a_stream_adds_up_to_the_whole(client: OpenAI) -> None:
    whole = client.completions.create(model="default", prompt="Once upon a time", max_tokens=20, temperature=0)
    chunks = list(client.completions.create(model="default", prompt="Once upon a time", max_tokens=20, temperature=0,
                                            stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert len(chunks) > 10, "token by token"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20


def test_echoed_logprobs_are_those_of_the_prompt(client: OpenAI) -> None:
    answer = client.completions.create(model="default", prompt="The capital of France is Paris", max_tokens=1,
                                       echo=True, logprobs=1, temperature=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert answer.choices[0].text.startswith("The capital of France is Paris")
    assert logprobs.token_logprobs[0] is None, "nothing comes before the first"
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs[1:])


def test_a_chat_answers(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="default", messages=QUESTION, max_tokens=32, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_a_chat_streams_with_its_role_first(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="default", messages=QUESTION, max_tokens=32, temperature=0)
    chunks = list(client.chat.completions.create(model="default", messages=QUESTION, max_tokens=32, temperature=0,
                                                 stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_chat_logprobs_spell_the_answer(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="default", messages=QUESTION, max_tokens=8, temperature=0,
                                            logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert bytes(byte for token in logprobs.content for byte in token.bytes or []).decode() \
        == answer.choices[0].message.content
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(other.logprob for other in token.top_logprobs), "greedy takes the likeliest"
        assert sum(math.exp(other.logprob) for other in token.top_logprobs) <= 1.0001


def test_a_seed_makes_an_answer_come_again(client: OpenAI) -> None:
    def drawn(seed: int) -> str | None:
        return client.chat.completions.create(model="default", messages=QUESTION, max_tokens=16, temperature=1.0,
                                              seed=seed).choices[0].message.content

    assert drawn(7) == drawn(7)
    assert len({drawn(seed) for seed in range(4)}) > 1


def test_a_stop_string_is_not_part_of_the_answer(client: OpenAI) -> None:
    answer = client.completions.create(model="default", prompt="One, two, three,", max_tokens=30, temperature=0,
                                       stop=["six"])
    assert "five" in answer.choices[0].text
    assert "six" not in answer.choices[0].text
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_is_called_with_arguments_that_fit_its_schema(client: OpenAI, choice: object) -> None:
    answer = client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": "How is the weather in Paris?"}], tools=[WEATHER],
        tool_choice=choice, max_tokens=100, temperature=0)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    assert answer.choices[0].finish_reason in ("tool_calls", "stop")


def test_a_streamed_tool_call_adds_up(client: OpenAI) -> None:
    chunks = client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": "How is the weather in Paris?"}], tools=[WEATHER],
        tool_choice="required", max_tokens=100, temperature=0, stream=True)
    name = arguments = ""
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.function is not None
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert name == "get_weather"
    assert set(json.loads(arguments)) == {"city"}


def test_a_tool_result_can_be_sent_back(client: OpenAI) -> None:
    messages = [
        {"role": "user", "content": "How is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function",
             "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny, 25 degrees"},
    ]
    answer = client.chat.completions.create(model="default", messages=messages, tools=[WEATHER], max_tokens=8)
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


class City(BaseModel):
    name: str
    inhabitants: int
    coastal: bool


def test_an_answer_parses_into_the_model_that_was_asked_for(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="default", messages=[{"role": "user", "content": "Describe Paris."}], response_format=City,
        max_tokens=200, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, City)


def test_json_mode_gives_json(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": "Give me a JSON object with one short key."}],
        response_format={"type": "json_object"}, max_tokens=200, temperature=0)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
    else:
        assert (answer.choices[0].message.content or "").lstrip().startswith("{")


def test_the_responses_api_answers_and_streams(client: OpenAI) -> None:
    answer = client.responses.create(model="default", input="What is the capital of France?", temperature=0,
                                     max_output_tokens=32)
    assert "Paris" in answer.output_text
    with client.responses.stream(model="default", input="What is the capital of France?", temperature=0,
                                 max_output_tokens=32) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert final.output_text == answer.output_text


def test_many_at_once_get_the_answers_they_would_get_alone(server: ServerProcess, client: OpenAI) -> None:
    prompts = [f"The number after {number} is" for number in range(12)]
    alone = [client.completions.create(model="default", prompt=prompt, max_tokens=6, temperature=0).choices[0].text
             for prompt in prompts]

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as many:
            answers = await asyncio.gather(*(
                many.completions.create(model="default", prompt=prompt, max_tokens=6, temperature=0)
                for prompt in prompts))
        return [answer.choices[0].text for answer in answers]

    assert asyncio.run(together()) == alone


def test_embeddings_are_refused_cleanly(client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.embeddings.create(model="default", input="hello")
    assert refused.value.status_code in (400, 404, 501)
    assert isinstance(refused.value.body, dict)
    assert "embedding" in refused.value.body["message"].lower()


def test_a_wrong_model_name_gets_the_right_ones(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="default") as refused:
        client.chat.completions.create(model="gpt-5", messages=QUESTION)
    assert refused.value.code == "model_not_found"


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="2048") as refused:
        client.completions.create(model="default", prompt=[1] * 3000, max_tokens=1)
    assert "3000" in str(refused.value)
