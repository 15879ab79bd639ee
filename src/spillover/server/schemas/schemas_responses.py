"""Request and response bodies of /v1/responses: text, and calls of the client's functions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from spillover.server.schemas.schemas_chat import (
    Content,
    FunctionDefinition,
    NamedFunction,
    NamedToolChoice,
    Tool,
    check_parts,
)
from spillover.server.schemas.schemas_common import (
    AnswerModel,
    KvTransferParams,
    Off,
    RequestModel,
    Text,
    Unused,
    UnusedFields,
)


class InputMessage(RequestModel):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: Unused = None
    status: Unused = None
    phase: Unused = None

    _text_only = field_validator("content", mode="before")(check_parts)


class FunctionCallItem(RequestModel):
    """A function call of an earlier response."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: str
    id: Unused = None
    status: Unused = None
    parsed_arguments: Unused = None


class FunctionCallOutput(RequestModel):
    """The output of the client's function."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Content
    id: Unused = None
    status: Unused = None

    _text_only = field_validator("output", mode="before")(check_parts)


def _item_type(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if kind in ("function_call", "function_call_output") else "message"


InputItem = Annotated[Annotated[InputMessage, Tag("message")] | Annotated[FunctionCallItem, Tag("function_call")]
                      | Annotated[FunctionCallOutput, Tag("function_call_output")], Discriminator(_item_type)]


class FunctionTool(FunctionDefinition):
    type: Literal["function"]

    def as_tool(self) -> Tool:
        return Tool(type="function", function=FunctionDefinition(**self.model_dump(exclude={"type"})))


class NamedFunctionChoice(RequestModel):
    type: Literal["function"]
    name: Text


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
    input: str | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    text: TextSettings | None = None
    truncation: Literal["disabled"] | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = Field(
        None, description="A stored response whose conversation is continued; its instructions are not kept.")
    store: bool | None = Field(None, description="Keep the response for previous_response_id; on unless false.")
    conversation: Annotated[None, Field(description="No conversation is kept: send it as input.")] = None
    background: Off | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=256, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionChoice | None = None
    stream_options: Unused = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=8)] | None = None
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    reasoning: Unused = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Unused = None
    # vLLM's extra fields that do not change the format of the response.
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    kv_transfer_params: KvTransferParams | None = None
    return_timings: bool | None = None

    @field_validator("conversation", mode="before")
    @classmethod
    def _no_conversations(cls, value: Any) -> Any:
        if value is not None:
            raise ValueError("this server keeps no conversations; use previous_response_id, or send it as input")
        return value

    @field_validator("tools", mode="before")
    @classmethod
    def _functions_only(cls, value: Any) -> Any:
        for tool in value if isinstance(value, list) else ():
            kind = tool.get("type") if isinstance(tool, dict) else None
            if isinstance(kind, str) and kind != "function":
                raise ValueError(f"only tools of type 'function' are served here, not '{kind[:64]}'")
        return value

    def chat_tools(self) -> list[Tool]:
        return [tool.as_tool() for tool in self.tools or ()]

    def chat_tool_choice(self) -> str | NamedToolChoice | None:
        if isinstance(self.tool_choice, NamedFunctionChoice):
            return NamedToolChoice(function=NamedFunction(name=self.tool_choice.name))
        return self.tool_choice


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


class OutputFunctionCall(AnswerModel):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]


class DeletedResponse(AnswerModel):
    id: str
    object: Literal["response"]
    deleted: bool


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
    output: list[OutputMessage | OutputFunctionCall]
    usage: ResponsesUsage | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    text: dict[str, Any]
    tools: list[Any]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    truncation: str
    metadata: dict[str, Any] | None
    timings: list[dict[str, Any]] | None = None
