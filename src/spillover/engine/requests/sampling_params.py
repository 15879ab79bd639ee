"""The sampling parameters of a request, with vLLM's names and defaults. They are checked here, once."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spillover.errors import RequestError, did_you_mean

GREEDY_EPSILON = 1e-5  # a temperature below this means argmax
_WHOLE = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs",
          "prompt_logprobs_start")  # fields that are whole numbers or None


@dataclass(frozen=True)
class StructuredOutputs:
    """A constraint of the output, exactly one of: a JSON schema, any JSON object, a regex, a Lark grammar, a choice."""

    json: str | dict[str, object] | None = None  # a schema, as a dict or text; a pydantic model class is accepted too
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None
    sent_as: str | None = None  # name of the API field that the caller sent it in, if not this class's

    def __post_init__(self) -> None:
        given = [self.json is not None, self.json_object, self.regex is not None, self.grammar is not None,
                 self.choice is not None]
        if sum(given) != 1:
            raise RequestError("structured_outputs takes exactly one of json, json_object, regex, grammar and choice")
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise RequestError(f"structured_outputs.{name} is a string; got {_shown(getattr(self, name))}")
        if self.choice is not None:
            if isinstance(self.choice, str) or not isinstance(self.choice, Iterable):
                raise RequestError("structured_outputs.choice is a list of strings, such as ['yes', 'no']; got "
                                   f"{_shown(self.choice)}")
            object.__setattr__(self, "choice", tuple(self.choice))
            if not self.choice or not all(isinstance(text, str) and text for text in self.choice):
                raise RequestError("structured_outputs.choice needs at least one non-empty string, and nothing else")

    @classmethod
    def of(cls, given: object) -> StructuredOutputs:
        """Convert what a caller may pass: a StructuredOutputs, or a dict of its fields."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise RequestError("structured_outputs is a StructuredOutputs or a dict such as {'json': schema} or "
                               f"{{'choice': ['yes', 'no']}}; got {_shown(given)}")
        names = [item.name for item in dataclasses.fields(cls) if item.name != "sent_as"]
        for name in given:
            if name not in names:
                raise RequestError(f"structured_outputs has no field {name!r}"
                                   f"{did_you_mean(str(name), names) or '; it takes one of ' + ', '.join(names)}")
        return cls(**{name: value for name, value in given.items() if value is not None})


def _schema(given: object) -> object:
    """Return as text or dict a JSON schema that is given as text, dict or pydantic model class."""
    if isinstance(given, str):
        return given
    if isinstance(given, Mapping):
        return dict(given)
    schema = getattr(given, "model_json_schema", None)  # pydantic's
    if isinstance(given, type) and callable(schema):
        return schema()
    raise RequestError("structured_outputs.json is a JSON schema as a dict or a string, or a pydantic model class; got "
                       f"{_shown(given)}")


def _shown(value: object) -> str:
    return value.__name__ if isinstance(value, type) else f"{type(value).__name__} {str(value)[:60]!r}"


@dataclass(frozen=True)
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16  # None: up to the maximum context length
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # number of alternatives besides the sampled token; 0: the sampled token only
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0  # first prompt position returned; positions before it may come from the cache
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None  # a dict of its fields is accepted too
    kv_coming: bool = False  # another engine is storing the prompt's KV in a shared tier: wait for it briefly

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        for name in _WHOLE:
            if (value := getattr(self, name)) is not None:
                try:
                    object.__setattr__(self, name, operator.index(value))
                except TypeError:
                    raise RequestError(f"{name} must be a whole number, got {value!r}") from None
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", StructuredOutputs.of(self.structured_outputs))
        self._check()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def needs_history(self) -> bool:
        """Return whether sampling, not only the model, depends on the previous tokens."""
        return (self.structured_outputs is not None or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
                or self.repetition_penalty != 1.0)

    def _check(self) -> None:
        def within(name: str, low: float, high: float, open_low: bool = False) -> None:
            value = getattr(self, name)
            fine = isinstance(value, int | float) and not math.isnan(value) and low <= value <= high
            if not fine or (open_low and value == low):
                raise RequestError(f"{name} must be {'above' if open_low else 'at least'} {low:g}"
                                   f"{'' if math.isinf(high) else f' and at most {high:g}'}, got {value!r}")

        within("n", 1, 256)
        within("temperature", 0, math.inf)
        within("top_k", 0, math.inf)
        within("top_p", 0, 1, open_low=True)
        within("min_p", 0, 1)
        within("presence_penalty", -2, 2)
        within("frequency_penalty", -2, 2)
        within("repetition_penalty", 0, math.inf, open_low=True)
        within("min_tokens", 0, math.inf)
        within("prompt_logprobs_start", 0, math.inf)
        if math.isinf(self.temperature) or math.isinf(self.repetition_penalty):
            raise RequestError("temperature and repetition_penalty must be finite, got inf")
        if self.max_tokens is not None:
            within("max_tokens", 1, math.inf)
            if self.min_tokens > self.max_tokens:
                raise RequestError(f"min_tokens ({self.min_tokens}) must be at most max_tokens ({self.max_tokens})")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                within(name, 0, 1000)
        if any(not text for text in self.stop):
            raise RequestError("a stop string must not be empty, got ''; leave it out of stop")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True; use stop_token_ids instead")
        for token, bias in (self.logit_bias or {}).items():
            if not isinstance(token, int) or token < 0 or not -100 <= bias <= 100:
                raise RequestError(f"logit_bias maps token ids to values from -100 to 100, got {token!r}: {bias!r}")
