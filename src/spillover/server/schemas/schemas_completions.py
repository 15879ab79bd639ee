"""Request and response bodies of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from spillover.server.schemas.schemas_common import (
    MAX_LOGPROBS,
    AnswerModel,
    Count,
    SamplingFields,
    Timings,
    TokenIds,
    Usage,
)

MAX_PROMPTS = 1024


def _form(prompt: Any) -> str | None:
    """Return which of the four forms a prompt has, by its first entry, so that a long list is validated once."""
    if isinstance(prompt, str):
        return "Text"
    if isinstance(prompt, list):
        first = prompt[0] if prompt else ""
        return "Texts" if isinstance(first, str) else "Lists" if isinstance(first, list) else "Ids"
    return None


Prompt = Annotated[
    Annotated[str, Tag("Text")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("Texts")]
    | Annotated[TokenIds, Tag("Ids")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("Lists")],
    Discriminator(_form, custom_error_type="prompt_form",
                  custom_error_message="a string, a list of strings, a list of token ids, or a list of such lists"),
]


class CompletionRequest(SamplingFields):
    prompt: Prompt
    max_tokens: Count | None = Field(None, description="16 unless given; 0 with echo scores the prompt alone.")
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = Field(None, description="The same as n, if given.")
    suffix: Literal[""] | None = Field(None, description="Text after the completion is not supported.")
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Keep this many of the prompt's last tokens.")


class LegacyLogprobs(AnswerModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(AnswerModel):
    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class CompletionResponse(AnswerModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    timings: list[Timings] | None = None
