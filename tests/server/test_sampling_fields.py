"""Fields missing from a request come from the model; errors name fields that were sent and say what to do."""

from __future__ import annotations

from typing import Any

import pytest

from spillover.server.api.requests.sampling import Context, sampling_params
from spillover.server.schemas.schemas_completions import CompletionRequest
from support.servers.running_server import Server


def test_a_field_that_was_sent_wins_over_the_models_default() -> None:
    defaults = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}

    def params(**fields: Any) -> tuple[float, float, float]:
        made = sampling_params(CompletionRequest(prompt="x", **fields), defaults, 4, None, None, None)
        return made.temperature, made.top_p, made.repetition_penalty

    assert params() == (0.2, 0.9, 1.1)
    assert params(temperature=1.0, repetition_penalty=1.0) == (1.0, 0.9, 1.0)
    assert params(temperature=None, top_p=0.5) == (0.2, 0.5, 1.1)


def test_the_server_samples_as_the_model_recommends(null_server: Server) -> None:
    with null_server.http() as http:
        for sent, expected in [({}, (0.2, 0.9)), ({"temperature": 0.5}, (0.5, 0.9)), ({"top_p": 1.0}, (0.2, 1.0))]:
            said = http.post("/v1/responses", json={"input": "x", "max_output_tokens": 2, **sent}).json()
            assert (said["temperature"], said["top_p"]) == expected


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [5000, 0])
def test_a_limit_is_named_as_it_was_sent(null_server: Server, field: str, value: int) -> None:
    with null_server.http() as http:
        body = {"messages": [{"role": "user", "content": "x"}], field: value}
        error = http.post("/v1/chat/completions", json=body).json()["error"]
    other = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}[field]
    assert error["param"] == field
    assert field in error["message"]
    assert other not in error["message"]


@pytest.mark.parametrize(("route", "body", "param"), [
    ("/v1/completions", {"prompt": "word " * 2000}, "prompt"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
    ("/v1/responses", {"input": "word " * 2000}, "input"),
])
def test_a_long_prompt_is_named_as_it_was_sent(null_server: Server, route: str, body: dict[str, Any],
                                               param: str) -> None:
    with null_server.http() as http:
        error = http.post(route, json=body).json()["error"]
    assert error["param"] == param
    assert "a larger --max-model-len (this model supports 8192)" in error["message"]


def test_a_longer_context_is_advised_only_where_the_model_has_one() -> None:
    assert Context(8192, 8192).advice == "Shorten it."
    assert "supports 8192" in Context(1024, 8192).advice


def test_too_many_least_tokens_name_no_field_that_was_not_sent(null_server: Server) -> None:
    with null_server.http() as http:
        error = http.post("/v1/completions", json={"prompt": "x", "min_tokens": 100}).json()["error"]
    assert error["param"] == "min_tokens"
    assert "max_tokens" not in error["message"]


def test_a_grammar_is_named_as_it_was_sent(null_server: Server) -> None:
    with null_server.http() as http:
        for body in ({"guided_regex": "(" }, {"response_format": {"type": "json_schema", "json_schema": {
                "name": "x", "schema": {"type": "objekt"}}}}):
            error = http.post("/v1/completions", json={"prompt": "x", **body}).json()["error"]
            assert error["message"].startswith(next(iter(body)) + " does not compile")
