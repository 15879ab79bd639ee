"""Bodies of the routes for models, tokenizing, and the server's state."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from spillover.server.schemas.schemas_chat import ConversationFields
from spillover.server.schemas.schemas_common import AnswerModel, RequestModel, Text, TokenId, Unused


class TokenizeTextRequest(RequestModel):
    model: Text | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(ConversationFields):
    model: Text | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    model: Text | None = None
    tokens: list[TokenId] = Field(fail_fast=True)


class TokenizeResponse(AnswerModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(AnswerModel):
    prompt: str


class ModelCard(AnswerModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None = None
    max_model_len: int | None
    permission: list[Any]


class ModelList(AnswerModel):
    object: Literal["list"]
    data: list[ModelCard]


class HealthResponse(AnswerModel):
    status: str


class KeyTotals(AnswerModel):
    requests: int
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int


class UsageResponse(AnswerModel):
    since: int
    keys: dict[str, KeyTotals]


class VersionResponse(AnswerModel):
    version: str


class SleepingResponse(AnswerModel):
    is_sleeping: bool


class ProfileResponse(AnswerModel):
    trace: str
    steps: int


class EmbeddingsRequest(RequestModel):
    """A request that is always refused, as there are no embeddings; its fields are ignored."""

    model_config = ConfigDict(extra="allow")
    model: Unused = None
    input: Unused = None
