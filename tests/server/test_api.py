"""The numbers and formats of every route, compared with the engine itself and the models of the OpenAPI document."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from spillover import LLM, SamplingParams
from spillover.server.schemas.schemas_admin import ModelList, TokenizeResponse
from spillover.server.schemas.schemas_chat import ChatResponse
from spillover.server.schemas.schemas_completions import CompletionResponse
from spillover.server.schemas.schemas_responses import ResponsesAnswer
from support.servers.running_server import Server

TEXT = "The quick brown fox jumps over the lazy dog — naïve café, 東京!"


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with server.http() as made:
        yield made


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=1024, gpu_memory="1.2GB") as made:
        yield made


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(http: httpx.Client, path: str, **body: Any) -> list[Any]:
    """Return the stream's chunks; it must end with [DONE]."""
    with http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_echo_scores_the_prompt_as_the_engine_does(http: httpx.Client, llm: LLM) -> None:
    expected = llm.generate(TEXT, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2, logprobs=2), False)[0]
    assert expected.prompt_logprobs is not None
    ids = expected.prompt_token_ids
    for max_tokens in (0, 1):
        for prompt in (TEXT, ids):
            made = post(http, "/v1/completions", prompt=prompt, echo=True, logprobs=2, max_tokens=max_tokens,
                        temperature=0)
            choice, scores = made["choices"][0], made["choices"][0]["logprobs"]
            count = len(ids) + max_tokens
            assert made["usage"]["completion_tokens"] == max_tokens
            assert [len(scores[name]) for name in scores] == [count] * 4
            assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
            for token, row, score, top in zip(ids[1:], expected.prompt_logprobs[1:], scores["token_logprobs"][1:],
                                              scores["top_logprobs"][1:], strict=False):
                assert row is not None
                assert score == pytest.approx(row[token].logprob, abs=1e-4)
                best = max(value.logprob for value in row.values())
                assert max(top.values()) == pytest.approx(best, abs=1e-4)
                assert (score == max(top.values())) == (row[token].rank == 1)  # lm_eval's criterion for greedy tokens
            assert choice["text"].startswith(TEXT)
            assert choice["text"][len(TEXT):] == (expected.outputs[0].text if max_tokens else "")
            _check_offsets(choice["text"], scores)


def _check_offsets(text: str, scores: dict[str, Any]) -> None:
    """Check that a token's text is at its offset; a piece of a character has the offset of the character."""
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert text[offset:offset + len(token)] == token


def test_prompt_logprobs_and_token_ids(http: httpx.Client, llm: LLM) -> None:
    expected = llm.generate(TEXT, SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=1), False)[0]
    made = post(http, "/v1/completions", prompt=TEXT, max_tokens=4, temperature=0, prompt_logprobs=1,
                return_token_ids=True)
    choice = made["choices"][0]
    assert choice["prompt_token_ids"] == expected.prompt_token_ids
    assert choice["token_ids"] == expected.outputs[0].token_ids
    assert choice["prompt_logprobs"][0] is None
    assert expected.prompt_logprobs is not None
    for row, other in zip(choice["prompt_logprobs"][1:], expected.prompt_logprobs[1:], strict=True):
        assert other is not None
        assert {int(token): value["rank"] for token, value in row.items()} == {t: v.rank for t, v in other.items()}
        assert all(math.isclose(value["logprob"], other[int(token)].logprob, abs_tol=1e-4)
                   for token, value in row.items())


def test_streams_carry_the_same_as_whole_answers(http: httpx.Client) -> None:
    asked = {"prompt": "Colours: red, green", "max_tokens": 12, "temperature": 0, "logprobs": 1, "echo": True,
             "return_token_ids": True, "n": 2}
    whole = post(http, "/v1/completions", **asked)
    CompletionResponse.model_validate(whole)
    chunks = events(http, "/v1/completions", **asked, stream_options={"include_usage": True,
                                                                      "continuous_usage_stats": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 24
    for index, choice in enumerate(whole["choices"]):
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [value for part in parts for value in part["logprobs"][name]] == choice["logprobs"][name]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]


def test_several_prompts_stream_side_by_side(http: httpx.Client) -> None:
    prompts = ["One, two,", "Red, green,", "North, south,"]
    whole = post(http, "/v1/completions", prompt=prompts, max_tokens=6, temperature=0)
    texts = [""] * 3
    for chunk in events(http, "/v1/completions", prompt=prompts, max_tokens=6, temperature=0):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]


def test_usage_counts_cached_tokens_and_timings_add_up(http: httpx.Client) -> None:
    prompt = "cached? " * 40
    for asked in ({"return_timings": True}, {}):
        headers = {} if asked else {"X-Spillover-Timings": "1"}
        made = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, "ignore_eos": True} | asked,
                         headers=headers).json()
    cached = made["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    timings = made["timings"][0]
    assert sum(timings["tokens"].values()) == made["usage"]["prompt_tokens"]
    assert timings["tokens"]["device"] == cached
    assert all(timings[phase] >= 0 for phase in ("queue", "restore", "prefill", "decode"))
    last = events(http, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=2,
                  return_timings=True, stream_options={"include_usage": True})[-1]
    assert last["timings"][0]["prefill"] > 0
    assert "timings" not in post(http, "/v1/completions", prompt="a", max_tokens=1)


def test_a_salt_keeps_caches_apart(http: httpx.Client) -> None:
    def cached(salt: str) -> int:
        made = post(http, "/v1/completions", prompt="secret " * 64, max_tokens=1, cache_salt=salt)
        count: int = made["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    assert cached("a") == 0
    assert cached("a") > 0
    assert cached("b") == 0


def test_chat_shapes(http: httpx.Client) -> None:
    made = post(http, "/v1/chat/completions", max_tokens=4, logprobs=True, top_logprobs=2, n=2, priority=3,
                return_token_ids=True, min_tokens=2, top_k=20, min_p=0.01, repetition_penalty=1.1, user="someone",
                messages=[{"role": "developer", "content": [{"type": "text", "text": "Be"},
                                                            {"type": "text", "text": "brief."}]},
                          {"role": "user", "content": "Hello"}])
    ChatResponse.model_validate(made)
    assert len(made["choices"]) == 2
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    refused = http.post("/v1/chat/completions", json={"messages": [picture]})
    assert refused.status_code == 400
    assert "only text is read here" in refused.json()["error"]["message"]


def test_a_final_message_is_continued(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Count to five."}, {"role": "assistant", "content": "one, two, three,"}]
    made = post(http, "/v1/chat/completions", messages=messages, max_tokens=6, temperature=0,
                continue_final_message=True, add_generation_prompt=False)
    assert "four" in made["choices"][0]["message"]["content"]


@pytest.mark.parametrize("begun", ["i", "end", "<|im_end|", "Paris is ", "assistant"])
def test_what_a_final_message_says_may_stand_elsewhere_in_the_prompt(http: httpx.Client, begun: str) -> None:
    messages = [{"role": "user", "content": "Name a city"}, {"role": "assistant", "content": begun}]
    made = post(http, "/tokenize", messages=messages, continue_final_message=True)
    assert post(http, "/detokenize", tokens=made["tokens"])["prompt"].endswith(f"<|im_start|>assistant\n{begun}")


def test_a_stop_string_in_the_token_that_ends_a_grammar_is_the_reason(http: httpx.Client) -> None:
    made = post(http, "/v1/completions", prompt="x", structured_outputs={"choice": ["yes"]}, stop=["e"], max_tokens=10)
    choice = made["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("y", "stop", "e")


def test_tokenize_and_back(http: httpx.Client) -> None:
    made = post(http, "/tokenize", prompt=TEXT, return_token_strs=True, add_special_tokens=False)
    TokenizeResponse.model_validate(made)
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert made["max_model_len"] == 1024
    assert post(http, "/detokenize", tokens=made["tokens"]) == {"prompt": TEXT}
    chat = post(http, "/tokenize", messages=[{"role": "user", "content": "hi"}])
    used = post(http, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=1)
    assert chat["count"] == used["usage"]["prompt_tokens"]


def test_responses_events_come_in_order(http: httpx.Client) -> None:
    asked = {"input": [{"role": "user", "content": "Say hi."}], "max_output_tokens": 6, "temperature": 0}
    with http.stream("POST", "/v1/responses", json=asked | {"stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    bodies = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [body["type"] for body in bodies] == names
    assert [body["sequence_number"] for body in bodies] == list(range(len(bodies)))
    assert [name.removeprefix("response.") for name in dict.fromkeys(names)][:-1] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done"]
    assert names[-1] in ("response.completed", "response.incomplete")
    whole = post(http, "/v1/responses", **asked)
    ResponsesAnswer.model_validate(whole)
    assert bodies[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]


def test_the_small_routes(http: httpx.Client) -> None:
    ModelList.model_validate(http.get("/v1/models").json())
    assert http.get("/health").json() == {"status": "ready"}
    assert http.get("/ping").status_code == http.post("/ping").status_code == 200
    assert http.get("/version").json()["version"]
    assert http.post("/reset_prefix_cache").status_code == 200
    document = http.get("/openapi.json").json()
    assert "/v1/chat/completions" in document["paths"]
    assert "x-request-id" in http.get("/version").headers


def test_sleeping_requests_wait(http: httpx.Client, server: Server) -> None:
    try:
        assert http.post("/sleep").json() == {"is_sleeping": True}
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert http.get("/health").json()["error"]["code"] == "engine_sleeping"
        with server.http() as other, pytest.raises(httpx.ReadTimeout):
            other.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=0.5)
    finally:
        assert http.post("/wake_up").json() == {"is_sleeping": False}
    assert http.get("/health").status_code == 200
    assert post(http, "/v1/completions", prompt="a", max_tokens=1)
