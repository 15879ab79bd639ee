"""Conversion of callers' prompts, conversations and sampling parameters to one form; errors say what to pass
instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spillover.engine.requests.sampling_params import SamplingParams
from spillover.errors import RequestError

Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, or {"prompt": ...} or {"prompt_token_ids": ...}
Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None

_PROMPT = "a string, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'"
_MESSAGES = "a list of messages such as [{'role': 'user', 'content': 'Hello'}]"
_KEYS = ("prompt", "prompt_token_ids")


def prompt_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Return a list of prompts, whether one prompt or several are given."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(f"generate() takes a prompt or a list of prompts, each {_PROMPT}; got {_shown(prompts)}")
    items: list[Any] = list(prompts)
    return [items] if items and _is_whole(items[0]) else items


def prompt_parts(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """Return the prompt's text, its token ids, or both."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        other = next((key for key, value in prompt.items() if key not in _KEYS and value is not None), None)
        if other is not None:
            raise RequestError(f"a prompt given as a dict has 'prompt' or 'prompt_token_ids'; '{other}' is not "
                               "supported")
        text, ids = (prompt.get(key) for key in _KEYS)
        if (text is None and ids is None) or not isinstance(text, str | None):
            raise RequestError(f"a prompt is {_PROMPT}; got {_shown(prompt)}")
        return text, None if ids is None else _ids(ids)
    return None, _ids(prompt)


def params_for(count: int, params: Params, default: SamplingParams) -> Sequence[SamplingParams]:
    """Return one SamplingParams for each of `count` prompts: those given, or else `default`."""
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * count
    wrong = params if isinstance(params, str | Mapping) or not isinstance(params, Sequence) else next(
        (each for each in params if not isinstance(each, SamplingParams)), None)
    if wrong is not None:
        raise RequestError("sampling_params is a SamplingParams, such as SamplingParams(temperature=0, max_tokens=64), "
                           f"or a list of them; got {_shown(wrong)}")
    if len(params) != count:
        raise RequestError(f"there are {count} prompts but {len(params)} sampling parameters; give one, or one per "
                           "prompt")
    return params


def priorities_for(count: int, priority: Sequence[int] | None) -> Sequence[int]:
    if priority is None:
        return [0] * count
    if not isinstance(priority, Sequence) or isinstance(priority, str) or len(priority) != count:
        raise RequestError(f"priority is a list with a whole number per prompt, so {count} of them; got "
                           f"{_shown(priority)}")
    return priority


def conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """Return a list of conversations, whether one conversation or several are given."""
    if not isinstance(messages, str | Mapping) and isinstance(messages, Sequence):
        if all(isinstance(each, Mapping) for each in messages):
            return [messages] if messages else []  # type: ignore[list-item]
        if all(isinstance(each, list | tuple) for each in messages):
            return [conversation(each) for each in messages]  # type: ignore[arg-type]
    raise RequestError(f"chat() takes {_MESSAGES}, or a list of such lists; got {_shown(messages)}")


def conversation(messages: Sequence[Message]) -> Sequence[Message]:
    wrong = isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages
    if wrong or not all(isinstance(each, Mapping) for each in messages):
        raise RequestError(f"a conversation is {_MESSAGES}; got {_shown(messages)}")
    return messages


def _ids(ids: Any) -> list[int]:
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Iterable):
        raise RequestError(f"a prompt is {_PROMPT}; got {_shown(ids)}")
    return ids if isinstance(ids, list) else list(ids)


def _is_whole(value: Any) -> bool:
    return hasattr(value, "__index__") and not hasattr(value, "__len__")


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
