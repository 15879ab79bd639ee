"""Sampling parameters as command-line options, shared by `spill chat` and `spill generate`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "Maximum tokens to generate."),
    ("temperature", float, "Scale of randomness; 0 is greedy: the same answer every time."),
    ("top_p", float, "Sample from the most likely tokens whose probabilities add up to this."),
    ("top_k", int, "Sample from this many most likely tokens; 0 is no limit."),
    ("min_p", float, "Leave out tokens less likely than this share of the most likely one."),
    ("presence_penalty", float, "Penalise tokens that the answer already has, once per token."),
    ("frequency_penalty", float, "Penalise tokens that the answer already has, for each occurrence."),
    ("repetition_penalty", float, "Divide the scores of tokens that have occurred, including in the prompt; 1 is off."),
)


def sampling_options(**defaults: Any) -> Callable[[Command], Command]:
    """Add all sampling flags to a command; it receives them as `sampling`, keywords of `SamplingParams`."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_sampling(**given: Any) -> Any:
            sampling = {name: value for name, _, _ in _OPTIONS if (value := given.pop(name)) is not None}
            return command(sampling={**sampling, "stop": given.pop("stop")}, **given)

        wrapped: Any = click.option("--stop", multiple=True, metavar="TEXT",
                                    help="End before this text; may be given more than once.")(with_sampling)
        for name, kind, text in reversed(_OPTIONS):
            default = defaults.get(name, DEFAULTS[name])
            wrapped = click.option("--" + name.replace("_", "-"), name, type=kind, default=default,
                                   show_default=True if default is not None else "the model's own", help=text)(wrapped)
        decorated: Command = wrapped
        return decorated

    return decorate


DEFAULTS: Mapping[str, Any] = {"max_tokens": 128, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
                               "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
