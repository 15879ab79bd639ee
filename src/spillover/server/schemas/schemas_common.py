"""Fields shared by several requests and responses, with OpenAI's and vLLM's names; other fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

MAX_N = 256
MAX_LOGPROBS = 20
_INT32 = 2**31 - 1


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class AnswerModel(BaseModel):
    model_config = ConfigDict(protected_namespaces=())


def _must_be_off(value: bool) -> bool:
    if value:
        raise ValueError("this is not supported here; leave it out")
    return value


Text = Annotated[str, Field(max_length=4096)]
Count = Annotated[int, Field(ge=0, le=_INT32)]
TokenId = Annotated[int, Field(ge=0, le=_INT32)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Stop = (Annotated[str, Field(min_length=1, max_length=4096)]
        | Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(max_length=64)])
LogitBias = dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]]
Off = Annotated[bool, AfterValidator(_must_be_off), WithJsonSchema({"type": "boolean", "const": False})]
# Dropped at once, so that the sent value does not take memory until the answer is finished.
Unused = Annotated[Any, AfterValidator(lambda value: None),
                   Field(description="Accepted, so that clients that send it work; not used.")]


Choices = Annotated[list[str], Field(max_length=4096, fail_fast=True)]


class StructuredOutputsField(RequestModel):
    """A constraint on the output: exactly one of these fields is set."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = Field(None, description="A Lark grammar.")


class JsonSchema(RequestModel):
    name: Text | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(RequestModel):
    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    type: Literal["json_object"]


class JsonSchemaFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Accepted; chunks are never padded.")


class UnusedFields(RequestModel):
    """Fields that OpenAI's clients may send and that have no effect."""

    user: Unused = None
    metadata: Unused = None
    store: Unused = None
    service_tier: Unused = None
    safety_identifier: Unused = None
    prompt_cache_key: Unused = None
    prompt_cache_retention: Unused = None
    request_id: Unused = None


class KvTransferParams(RequestModel):
    """How the prompt's KV reaches this server."""

    do_remote_prefill: bool = Field(False, description="Another server stores the prompt's KV where this one finds it: "
                                                       "wait for what is missing, as long as computing it would take.")


class SamplingFields(UnusedFields):
    """Fields that determine sampling; the same in completions and chat."""

    model: Text | None = Field(None, description="A served name, or 'default'; may be left out.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT32)] | None = Field(None, description="0 or -1: off.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Unused = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs_start: Count | None = Field(
        None, description="First prompt position with log probabilities; what is before it may come from a cache.")
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_timings: bool | None = Field(None, description="Adds times, and where prompt tokens came from.")
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-_INT32, le=_INT32)] | None = Field(None, description="Lower is served first.")
    kv_transfer_params: KvTransferParams | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    use_beam_search: Off | None = None
    length_penalty: Unused = None
    # SGLang's fields: its gateway and vllm-router add them to every request that they forward.
    no_stop_trim: Off | None = None
    return_hidden_states: Off | None = None


# Answers


class ErrorDetailModel(AnswerModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(AnswerModel):
    error: ErrorDetailModel


class PromptTokensDetails(AnswerModel):
    cached_tokens: int


class Usage(AnswerModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Sources(AnswerModel):
    """The sources of the prompt's tokens; the six counts add up to the prompt's length."""

    computed: int
    device: int
    host: int
    pool: int
    disk: int
    remote: int


class Timings(AnswerModel):
    """The times of a request in seconds; queue, restore, prefill and decode add up to the whole."""

    queue: float
    restore: float
    prefill: float
    decode: float
    tokens: Sources
