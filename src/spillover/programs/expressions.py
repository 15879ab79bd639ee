"""The parts of a program's text: fixed text, `gen`, `select` and the roles of a chat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, get_args

from spillover.errors import did_you_mean
from spillover.programs.backend import CONSTRAINTS
from spillover.programs.lifetime import ProgramError

Normalised = Literal["tokens", "bytes", "sum"]
Role = Literal["system", "user", "assistant"]

MAX_TOKENS = 128  # default of a gen
# Sampling options of a gen, with the names of SamplingParams.
SAMPLING = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
            "frequency_penalty", "repetition_penalty", "seed", "stop", "stop_token_ids", "ignore_eos")


class Expression:
    """A part of a program's text; parts are joined with `+`, also with plain strings."""

    def __add__(self, other: str | Expression) -> Joined:
        return joined(self, other)

    def __radd__(self, other: str | Expression) -> Joined:
        return joined(other, self)


@dataclass(frozen=True)
class Text(Expression):
    text: str


@dataclass(frozen=True)
class Gen(Expression):
    name: str | None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Select(Expression):
    name: str | None
    choices: tuple[str, ...]
    normalised: Normalised


@dataclass(frozen=True)
class Spoken(Expression):
    """One message of a chat."""

    role: Role
    parts: tuple[Expression, ...]


@dataclass(frozen=True)
class Joined(Expression):
    parts: tuple[Expression, ...]


def gen(name: str | None = None, *, choices: Sequence[str] | None = None, **options: Any) -> Gen | Select:
    """Generate text, kept as `s[name]`. Options are those of SamplingParams (max_tokens, temperature, stop, seed, ...);
    `regex`, `schema` (a dict, text or pydantic class) or `grammar` constrain it; `choices` makes it a select."""
    if choices is not None:
        if options:
            raise ProgramError(f"gen(choices=...) scores fixed texts and takes no {next(iter(options))}")
        return select(name, choices)
    check_options(options)
    return Gen(name, options)


def select(name: str | None, choices: Sequence[str], *, normalised: Normalised = "tokens") -> Select:
    """Choose the likeliest of several texts, kept as `s[name]`: by its mean log probability per token, per byte of its
    text ("bytes"), or by their sum ("sum"). Of equal choices the first is taken."""
    if isinstance(choices, str) or not choices or not all(isinstance(text, str) and text for text in choices):
        raise ProgramError(f"select takes a list of texts, none of them empty, such as ['yes', 'no']; got {choices!r}")
    if len(set(choices)) != len(choices):
        raise ProgramError(f"select has the same choice twice: {list(choices)}")
    if normalised not in get_args(Normalised):
        raise ProgramError(f"select(normalised=) is one of {', '.join(get_args(Normalised))}; got {normalised!r}")
    return Select(name, tuple(choices), normalised)


def system(text: str | Expression) -> Spoken:
    return spoken("system", text)


def user(text: str | Expression) -> Spoken:
    return spoken("user", text)


def assistant(text: str | Expression) -> Spoken:
    """Write the assistant's message: fixed text, gen and select in any order."""
    return spoken("assistant", text)


def image(*_: object, **__: object) -> NoReturn:
    """Refuse an image or a video."""
    raise ProgramError("images are not supported: the models here read text only; describe the image in words, or "
                       "ask the server of a vision model without this language")


video = image


def spoken(role: Role, text: str | Expression) -> Spoken:
    parts = parts_of(text)
    for part in parts:
        if isinstance(part, Spoken):
            raise ProgramError(f"{role}(...) holds a message of its own, {part.role}(...); messages follow each other")
        if role != "assistant" and not isinstance(part, Text):
            raise ProgramError(f"{type(part).__name__.lower()} belongs in assistant(...), not in {role}(...): a chat "
                               "template lets the model write as the assistant only")
    return Spoken(role, parts)


def joined(*parts: str | Expression) -> Joined:
    return Joined(tuple(part for one in parts for part in parts_of(one)))


def parts_of(value: str | Expression) -> tuple[Expression, ...]:
    """Return the parts of an expression; raise ProgramError if it is not one."""
    if isinstance(value, str):
        return (Text(value),) if value else ()
    if isinstance(value, Joined):
        return value.parts
    if isinstance(value, Expression):
        return (value,)
    raise ProgramError(f"a program's text is made of strings, gen, select and roles; got {type(value).__name__} "
                       f"{str(value)[:60]!r}")


def check_options(options: dict[str, Any]) -> None:
    """Refuse unknown options of a gen before anything runs."""
    for name in options:
        if name not in SAMPLING and name not in CONSTRAINTS:
            near = did_you_mean(name, (*SAMPLING, *CONSTRAINTS), listed=True)
            raise ProgramError(f"gen has no option '{name}'{near}")
    given = [name for name in CONSTRAINTS if options.get(name) is not None]
    if len(given) > 1:
        raise ProgramError(f"gen takes one of regex, schema and grammar; got {' and '.join(given)}")


def normalise(logprobs: Sequence[float], choice: str, how: Normalised) -> float:
    """Return the score of a choice whose tokens have these log probabilities."""
    total = math.fsum(logprobs)
    return total if how == "sum" else total / (len(choice.encode()) if how == "bytes" else len(logprobs))
