"""The configuration of speculation: vLLM's `--speculative-config` as JSON, or flags; checked before any loading."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from spillover.errors import SpilloverError, did_you_mean

METHODS = ("ngram", "suffix", "substitute", "draft_model", "eagle3")
WITH_MODEL = ("draft_model", "eagle3")  # methods that read a separate checkpoint
# Methods in which a model drafts: these also draft when acceptance is simulated.
MODEL_METHODS = ("substitute", "draft_model", "eagle3")
DEFAULT_TOKENS = {"ngram": 8, "suffix": 16, "substitute": 20, "draft_model": 4, "eagle3": 4}
SUBSTITUTE_DTYPES = ("int4", "int8")
MOST_TOKENS = 64  # maximum tokens of a draft
USUAL_BRANCHES = 4  # default maximum number of branches of a draft, if their number is chosen by what pays off
MOST_BRANCHES = 16  # maximum number of branches of a draft
LONGEST_MATCH = 64  # maximum tokens of a match of n-gram lookup
KEYS = ("method", "model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "adaptive",
        "substitute_dtype", "max_branches")
_OTHER_DRAFTERS = ("eagle", "medusa", "mlp_speculator", "mtp", "dflash")


@dataclass(frozen=True)
class SpeculativeConfig:
    method: str  # one of METHODS, or "simulated"
    num_tokens: int  # maximum tokens of a draft
    lookup_min: int = 3  # ngram: minimum tokens of a match
    lookup_max: int = 5  # ngram: maximum tokens of a match
    adaptive: bool = True  # False: always verify all proposed tokens, whatever they cost
    simulated: tuple[float, ...] = ()  # share of drafts accepted up to each position; (): acceptance is not simulated
    substitute_dtype: str = "int4"  # substitute: type that the copies of layers are rounded to
    model: str | None = None  # draft_model, eagle3: path or name of the model
    max_branches: int = 0  # substitute: maximum number of branches of a draft; 0: drafts are chains

    def __post_init__(self) -> None:
        if self.method not in METHODS and not self.simulated:
            if self.method in _OTHER_DRAFTERS:
                raise SpilloverError(f"the speculative method {self.method!r} needs a drafter of a kind that is not "
                                     f"supported; use one of {', '.join(METHODS)}")
            raise SpilloverError(f"there is no speculative method {self.method!r}; use one of {', '.join(METHODS)}"
                                 + did_you_mean(self.method, METHODS))
        if self.method in WITH_MODEL and not self.model:
            what = "a model that drafts" if self.method == "draft_model" else "the folder of a head"
            raise SpilloverError(f"the speculative method {self.method} needs {what}: give "
                                 "--speculative-model, or model in --speculative-config")
        if self.method not in WITH_MODEL and self.model:
            raise SpilloverError(f"the speculative method {self.method} needs no model: leave {self.model!r} out, or "
                                 "give the method draft_model")
        if not 1 <= self.num_tokens <= MOST_TOKENS:
            raise SpilloverError(f"num_speculative_tokens is from 1 to {MOST_TOKENS}; got {self.num_tokens}")
        if not 1 <= self.lookup_min <= self.lookup_max <= LONGEST_MATCH:
            raise SpilloverError(f"prompt_lookup_min and prompt_lookup_max are from 1 to {LONGEST_MATCH}, the first "
                                 f"not above the second; got {self.lookup_min} and {self.lookup_max}")
        if not 0 <= self.max_branches <= MOST_BRANCHES:
            raise SpilloverError(f"max_branches is from 0 to {MOST_BRANCHES}; got {self.max_branches}")
        if self.substitute_dtype not in SUBSTITUTE_DTYPES:
            raise SpilloverError(f"substitute_dtype is one of {', '.join(SUBSTITUTE_DTYPES)}; got "
                                 f"{self.substitute_dtype!r}{did_you_mean(self.substitute_dtype, SUBSTITUTE_DTYPES)}")

    @classmethod
    def of(cls, given: str | None, method: str | None, num_tokens: int | None, adaptive: bool,
           simulate: str | None, model: str | None = None) -> SpeculativeConfig | None:
        """Return the configuration that the flags describe; None if they ask for no speculation."""
        if simulate is not None:
            named = given is not None or method is not None or model is not None
            drafting = cls.of(given, method, num_tokens if named else None, adaptive, None, model)
            rates = _rates(simulate)
            if drafting is None:
                return cls("simulated", min(num_tokens or len(rates), len(rates)), adaptive=adaptive, simulated=rates)
            if drafting.method not in MODEL_METHODS:
                other = "--speculative-config" if given is not None else "--speculative-method"
                raise SpilloverError(f"--speculative-simulate and {other} {drafting.method} contradict each other: "
                                     "only a model can draft for random weights, so give one of them")
            return replace(drafting, num_tokens=min(drafting.num_tokens, len(rates)), simulated=rates)
        if given is not None:
            if method is not None or num_tokens is not None or model is not None:
                plain = ("--speculative-method" if method is not None
                         else "--speculative-model" if model is not None else "--num-speculative-tokens")
                raise SpilloverError(f"--speculative-config and {plain} set the same thing: give one of them")
            return cls._from_json(_object(given), adaptive)
        if method is None and model is not None:
            method = "draft_model"
        if method is not None:
            return cls(method, _default(method) if num_tokens is None else num_tokens, adaptive=adaptive, model=model,
                       max_branches=_default_branches(method, adaptive))
        if num_tokens is not None:
            raise SpilloverError("--num-speculative-tokens needs a method: give --speculative-method, one of "
                                 f"{', '.join(METHODS)}")
        return None

    @classmethod
    def _from_json(cls, fields: Mapping[str, Any], adaptive: bool) -> SpeculativeConfig:
        for name in fields:
            if name not in KEYS:
                raise SpilloverError(f"--speculative-config has no key {name!r}"
                                     f"{did_you_mean(name, KEYS) or '; it takes ' + ', '.join(KEYS)}")
        method = fields.get("method")
        if not isinstance(method, str):
            raise SpilloverError(f"--speculative-config needs a method, one of {', '.join(METHODS)}, such as "
                                 '{"method": "ngram", "num_speculative_tokens": 4}')
        count = _whole(fields, "num_speculative_tokens", _default(method))
        low, high = fields.get("prompt_lookup_min"), fields.get("prompt_lookup_max")
        if method != "ngram" and (low is not None or high is not None):
            raise SpilloverError("prompt_lookup_min and prompt_lookup_max apply to the method ngram, not to "
                                 f"{method!r}: leave them out")
        # As in vLLM, if only one of them is given, the other has the same value.
        highest = _whole(fields, "prompt_lookup_max", cls.lookup_max if low is None else 0)
        lowest = _whole(fields, "prompt_lookup_min", cls.lookup_min if high is None else highest)
        highest = highest or lowest
        switch = fields.get("adaptive", adaptive)
        if not isinstance(switch, bool):
            raise SpilloverError(f"adaptive in --speculative-config is true or false; got {switch!r}")
        rounded = fields.get("substitute_dtype", cls.substitute_dtype)
        if method != "substitute" and "substitute_dtype" in fields:
            raise SpilloverError(f"substitute_dtype applies to the method substitute, not to {method!r}: leave it out")
        if method != "substitute" and "max_branches" in fields:
            raise SpilloverError(f"max_branches applies to the method substitute, not to {method!r}: leave it out")
        branches = _whole(fields, "max_branches", _default_branches(method, switch))
        model = fields.get("model")
        if model is not None and not isinstance(model, str):
            raise SpilloverError(f"model in --speculative-config is a path or a name; got {model!r}")
        return cls(method, count, lowest, highest, switch, substitute_dtype=str(rounded), model=model,
                   max_branches=branches)


def _default(method: str) -> int:
    return DEFAULT_TOKENS.get(method, 4)


def _default_branches(method: str, adaptive: bool) -> int:
    return USUAL_BRANCHES if method == "substitute" and adaptive else 0


def _object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SpilloverError(f"--speculative-config is a JSON object such as {{\"method\": \"ngram\"}}; got {text!r} "
                             f"({error})") from None
    if not isinstance(value, dict):
        raise SpilloverError(f"--speculative-config is a JSON object such as {{\"method\": \"ngram\"}}; got {text!r}")
    return value


def _whole(fields: Mapping[str, Any], name: str, default: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise SpilloverError(f"{name} in --speculative-config is a whole number; got {value!r}")
    return value


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    falling = all(one >= other for one, other in itertools.pairwise(rates))
    if not 1 <= len(rates) <= MOST_TOKENS or not falling or not all(0 <= rate <= 1 for rate in rates):
        raise SpilloverError("--speculative-simulate is the share of drafts accepted up to each position, from 0 to 1 "
                             f"and never rising, such as 0.8,0.65,0.5; got {text!r}")
    return rates
