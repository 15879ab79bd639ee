"""Requests as other routers forward them: parsed and rewritten, with additional fields of their own."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel, ValidationError

from spillover.cluster.keys import TEXT, read_prompt
from spillover.server.schemas.schemas_chat import ChatRequest
from spillover.server.schemas.schemas_completions import CompletionRequest
from spillover.server.schemas.schemas_responses import ResponsesRequest

# The output of sglang-router 0.3.2 and vllm-router for {"model", "prompt" or "messages" or "input", "max_tokens": 4}.
SENT_ON: list[tuple[type[BaseModel], str, str]] = [
    (CompletionRequest, "/v1/completions", """{"model":"smollm2","prompt":"The capital of","max_tokens":4,"stream":true,
     "stream_options":{"include_usage":true},"echo":false,"seed":3,"top_k":5,"min_tokens":2,"no_stop_trim":false,
     "ignore_eos":true,"skip_special_tokens":true,"return_hidden_states":false,"cache_salt":"x"}"""),
    (ChatRequest, "/v1/chat/completions", """{"messages":[{"role":"user","content":"hi"}],"model":"smollm2",
     "logprobs":false,"max_completion_tokens":4,"stream":false,"no_stop_trim":false,"ignore_eos":false,
     "continue_final_message":false,"skip_special_tokens":true,"separate_reasoning":true,"stream_reasoning":true,
     "return_hidden_states":false}"""),
    (ChatRequest, "/v1/chat/completions", """{"model":"smollm2","messages":[{"role":"user","content":"hi"}],
     "stream":false,"max_tokens":4,"logprobs":false,"no_stop_trim":false,"ignore_eos":false,
     "continue_final_message":false,"skip_special_tokens":true,"separate_reasoning":true,"stream_reasoning":true,
     "return_hidden_states":false,"include_reasoning":true}"""),
    (ResponsesRequest, "/v1/responses", """{"input":"hi","model":"smollm2","store":true,"stream":null,"temperature":1.0,
     "top_p":1.0,"priority":0,"top_k":-1,"min_p":0.0,"repetition_penalty":1.0}"""),
]


@pytest.mark.parametrize(("model", "path", "body"), SENT_ON)
def test_what_other_routers_add_is_taken(model: type[BaseModel], path: str, body: str) -> None:
    assert model.model_validate(json.loads(body)).model_dump()["model"] == "smollm2"
    assert read_prompt(path, body.encode(), None, {TEXT: None}).model == "smollm2"


@pytest.mark.parametrize("field", ["no_stop_trim", "return_hidden_states"])
def test_what_would_change_the_answer_is_refused(field: str) -> None:
    with pytest.raises(ValidationError, match="not supported here"):
        CompletionRequest.model_validate({"prompt": "x", field: True})
