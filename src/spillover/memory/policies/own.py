"""Policies of the user's own: made from module:Class, and what is told of one that fails."""

from __future__ import annotations

import importlib
from typing import Any

from spillover.errors import SpilloverError, did_you_mean


def make_own(name: str, problem: str, methods: dict[str, str], flag: str) -> Any:
    """Return an object of the class that `name` says. `problem`: how the error begins; `methods`: names that it must
    have, with how each is called."""
    module, _, cls = name.partition(":")
    try:
        found = importlib.import_module(module)
        if not hasattr(found, cls):
            classes = [each for each, value in vars(found).items() if isinstance(value, type)]
            raise SpilloverError(f"{problem} could not be made: {module} has no class {cls}"
                                 + did_you_mean(cls, classes))
        policy = getattr(found, cls)()
    except SpilloverError:
        raise
    except (Exception, SystemExit) as error:  # it is the user's code: anything may come out of it
        raise SpilloverError(f"{problem} could not be made ({failure(error)})") from error
    for method, call in methods.items():
        if not callable(getattr(policy, method, None)):
            raise SpilloverError(f"{flag} {name}: the class has no method {call}, which the engine calls; add it")
    return policy


def failure(error: BaseException) -> str:
    """Describe an error on one line, with its kind: a KeyError alone says only '3'."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
