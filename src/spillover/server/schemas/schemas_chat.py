"""Request and response bodies of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from spillover.server.schemas.schemas_common import (
    MAX_LOGPROBS,
    AnswerModel,
    Count,
    Off,
    RequestModel,
    SamplingFields,
    Text,
    Timings,
    Unused,
    Usage,
)

TEXT_PARTS = ("text", "input_text", "output_text")


class ContentPart(RequestModel):
    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: Unused = None
    logprobs: Unused = None
    cache_control: Unused = None


Content = str | Annotated[list[ContentPart], Field(max_length=4096, fail_fast=True)]


def check_parts(content: Any) -> Any:
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in TEXT_PARTS:
            raise ValueError(f"only text is read here; a content part of type '{kind[:64]}' cannot be used")
    return content


class FunctionCall(RequestModel):
    name: Text
    arguments: str | dict[str, Any] = "{}"
    parsed_arguments: Unused = None


class ToolCall(RequestModel):
    id: Text | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(RequestModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=256, fail_fast=True)] | None = None
    tool_call_id: Text | None = None
    # Fields that OpenAI's clients include when they send an earlier answer back.
    refusal: Unused = None
    audio: Unused = None
    annotations: Unused = None
    function_call: Literal[None] = None
    parsed: Unused = None
    reasoning: Unused = None
    reasoning_content: Unused = None

    _text_only = field_validator("content", mode="before")(check_parts)

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role '{self.role}' needs content")
        return self


class FunctionDefinition(RequestModel):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(RequestModel):
    name: Text


class NamedToolChoice(RequestModel):
    type: Literal["function"] = "function"
    function: NamedFunction


class ConversationFields(RequestModel):
    """A conversation and how to render it; also the fields of /tokenize."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[Tool], Field(max_length=256, fail_fast=True)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(SamplingFields, ConversationFields):
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: Off | None = None
    reasoning_effort: Unused = None
    verbosity: Unused = None
    prediction: Unused = None
    include_reasoning: Unused = None
    separate_reasoning: Unused = None
    stream_reasoning: Unused = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=8)] | None = None


class TopLogprob(AnswerModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerModel):
    content: list[TokenLogprob] | None
    refusal: None = None


class AnsweredFunction(AnswerModel):
    name: str
    arguments: str


class AnsweredToolCall(AnswerModel):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnsweredMessage(AnswerModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[AnsweredToolCall] | None = None


class ChatChoice(AnswerModel):
    index: int
    message: AnsweredMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatResponse(AnswerModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    timings: list[Timings] | None = None
