"""/v1/responses: what it takes and gives. Text only: no tools, no state kept between calls."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from spillover.server.schemas_chat import Content, check_parts
from spillover.server.schemas_common import AnswerModel, Off, RequestModel, Text, Unused, UnusedFields


class InputMessage(RequestModel):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: Unused = None
    status: Unused = None
    phase: Unused = None

    _text_only = field_validator("content", mode="before")(check_parts)


class PlainFormat(RequestModel):
    type: Literal["text"]


class JsonObject(RequestModel):
    type: Literal["json_object"]


class NamedSchema(RequestModel):
    type: Literal["json_schema"]
    name: Text | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextSettings(RequestModel):
    format: Annotated[PlainFormat | JsonObject | NamedSchema, Field(discriminator="type")] | None = None
    verbosity: Unused = None


class ResponsesRequest(UnusedFields):
    model: Text | None = None
    input: str | Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    text: TextSettings | None = None
    truncation: Literal["disabled"] | None = None
    previous_response_id: Annotated[None, Field(description="No response is kept: send all as input.")] = None
    conversation: Annotated[None, Field(description="No conversation is kept: send it as input.")] = None
    background: Off | None = None
    tools: Annotated[list[Any], Field(max_length=0, description="/v1/chat/completions serves tools.")] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    stream_options: Unused = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=8)] | None = None
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    reasoning: Unused = None
    parallel_tool_calls: Unused = None
    max_tool_calls: Unused = None
    # Of vLLM's extra fields, those that change nothing about the answer's shape.
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    return_timings: bool | None = None

    @field_validator("previous_response_id", "conversation", mode="before")
    @classmethod
    def _stateless(cls, value: Any) -> Any:
        if value is not None:
            raise ValueError("this server keeps no responses; send the whole conversation as input")
        return value

    @field_validator("tools", mode="before")
    @classmethod
    def _no_tools(cls, value: Any) -> Any:
        if isinstance(value, list) and value:
            raise ValueError("tools are served by /v1/chat/completions, not here")
        return value


class OutputText(AnswerModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(AnswerModel):
    type: Literal["message"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class InputTokensDetails(AnswerModel):
    cached_tokens: int


class OutputTokensDetails(AnswerModel):
    reasoning_tokens: int


class ResponsesUsage(AnswerModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponsesAnswer(AnswerModel):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputMessage]
    usage: ResponsesUsage | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    text: dict[str, Any]
    tools: list[Any]
    tool_choice: str
    parallel_tool_calls: bool
    previous_response_id: None
    truncation: str
    metadata: dict[str, Any] | None
    timings: list[dict[str, Any]] | None = None
