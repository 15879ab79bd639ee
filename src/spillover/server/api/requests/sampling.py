"""Converts a request's fields to the engine's sampling parameters, refusing all that the engine would refuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spillover.engine.requests.sampling_params import SamplingParams, StructuredOutputs
from spillover.server.api.errors import ApiError
from spillover.server.schemas.schemas_common import (
    JsonObjectFormat,
    JsonSchemaFormat,
    KvTransferParams,
    SamplingFields,
)

# Fields that default to the model's value, or to the engine's if the model has none.
_PLAIN = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
          "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens",
          "skip_special_tokens", "prompt_logprobs_start")


def sampling_params(body: SamplingFields, defaults: Mapping[str, Any], max_tokens: int | None, logprobs: int | None,
                    prompt_logprobs: int | None, structured: StructuredOutputs | None,
                    **changes: Any) -> SamplingParams:
    """Return a request's parameters. `defaults` has the model's values for fields that were not sent."""
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise ApiError(400, f"min_tokens is {body.min_tokens}, but the answer has at most {max_tokens} tokens",
                       "min_tokens")
    given = {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
    bias = {int(token): value for token, value in body.logit_bias.items()} if body.logit_bias else None
    return SamplingParams(**(dict(defaults) | given | {"n": body.n or 1, "logit_bias": bias, "max_tokens": max_tokens,
                                      "logprobs": logprobs, "prompt_logprobs": prompt_logprobs,
                                      "structured_outputs": structured,
                                      "kv_coming": kv_coming(body.kv_transfer_params)} | changes))


def kv_coming(given: KvTransferParams | None) -> bool:
    """Return whether another server stores the prompt's KV in a tier that this server reads."""
    return given is not None and given.do_remote_prefill


def structured_outputs(body: SamplingFields) -> StructuredOutputs | None:
    """Return the requested constraint, whichever field it was given in; None if there is none."""
    constraints: list[StructuredOutputs] = []
    if body.structured_outputs is not None:
        inner = body.structured_outputs
        constraints.append(StructuredOutputs(json=inner.json_, json_object=bool(inner.json_object), regex=inner.regex,
                                             grammar=inner.grammar,
                                             choice=None if inner.choice is None else tuple(inner.choice)))
    if body.guided_json is not None:
        constraints.append(StructuredOutputs(json=body.guided_json, sent_as="guided_json"))
    if body.guided_regex is not None:
        constraints.append(StructuredOutputs(regex=body.guided_regex, sent_as="guided_regex"))
    if body.guided_choice is not None:
        constraints.append(StructuredOutputs(choice=tuple(body.guided_choice), sent_as="guided_choice"))
    if body.guided_grammar is not None:
        constraints.append(StructuredOutputs(grammar=body.guided_grammar, sent_as="guided_grammar"))
    if isinstance(body.response_format, JsonObjectFormat):
        constraints.append(StructuredOutputs(json_object=True, sent_as="response_format"))
    elif isinstance(body.response_format, JsonSchemaFormat):
        schema = body.response_format.json_schema.schema_
        if schema is None:
            raise ApiError(400, "response_format of type json_schema needs json_schema.schema", "response_format")
        constraints.append(StructuredOutputs(json=schema, sent_as="response_format"))
    if len(constraints) > 1:
        raise ApiError(400, "response_format, structured_outputs and the guided_ fields each constrain the output: "
                            "give one of them", "response_format")
    return constraints[0] if constraints else None


@dataclass(frozen=True)
class Context:
    """The limit on the length of prompt and answer together."""

    tokens: int
    most: int  # longest context that the model supports

    @property
    def advice(self) -> str:
        """Return advice for the user on a prompt that is too long."""
        if self.tokens >= self.most:
            return "Shorten it."
        return f"Shorten it, or start the server with a larger --max-model-len (this model supports {self.most})."


def resolve_max_tokens(context: Context, num_prompt: int, requested: int | None, default: int | None, name: str,
                       prompt: str) -> int:
    """Return the maximum number of answer tokens; raise a 400 error with limit and size if they do not fit.

    `name` and `prompt` are the names of the request's fields for the answer's length and for the prompt.
    """
    room = context.tokens - num_prompt
    if room < 1:
        raise ApiError(400, f"This model's context holds {context.tokens} tokens, prompt and answer together, but the "
                            f"prompt alone has {num_prompt}. {context.advice}", prompt, "context_length_exceeded")
    if requested is None:
        return room if default is None else min(default, room)
    if requested > room:
        raise ApiError(400, f"This model's context holds {context.tokens} tokens, but {num_prompt + requested} were "
                            f"requested: {num_prompt} in the prompt and {requested} of answer ({name}). Lower {name} "
                            f"to at most {room}, or shorten the prompt.", name, "context_length_exceeded")
    return requested
