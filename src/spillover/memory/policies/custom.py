"""Users' own policies: creating one from module:Class, and describing its failures."""

from __future__ import annotations

import importlib
from typing import Any

from spillover.errors import SpilloverError, did_you_mean


def make_custom(name: str, problem: str, methods: dict[str, str], flag: str) -> Any:
    """Return an instance of the class that `name` gives as module:Class. `problem`: the beginning of error messages;
    `methods`: the methods that the class must have, each with its signature."""
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
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise SpilloverError(f"{problem} could not be made ({failure(error)})") from error
    for method, call in methods.items():
        if not callable(getattr(policy, method, None)):
            raise SpilloverError(f"{flag} {name}: the class has no method {call}, which the engine calls; add it")
    return policy


def failure(error: BaseException) -> str:
    """Describe an error on one line, including its type: the text of a KeyError alone may be just '3'."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
