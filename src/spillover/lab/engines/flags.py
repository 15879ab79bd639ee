"""Conversion of an engine's flags from YAML to its command line.

`cpu-offload-gb: 8` -> `--cpu-offload-gb 8`; true -> the bare flag; false -> `--no-...`; a mapping -> JSON; null omits
the flag (so that an experiment can remove one from a preset). A name that starts with dashes keeps them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FlagStyle:
    """The flag syntax of one program."""

    short: Collection[str] = ()  # long names with one dash, such as llama.cpp's -ncmoe
    has_negative: bool = True  # whether false is written --no-NAME; otherwise the flag is omitted
    repeats: bool = False  # whether a list repeats the flag; otherwise its values follow one flag


def to_flags(args: Mapping[str, Any], style: FlagStyle) -> list[str]:
    return [word for name, value in args.items() for word in _words(name, value, style)]


def _words(name: str, value: Any, style: FlagStyle) -> Iterator[str]:
    flag = _flag(name, style)
    if value is None or (value is False and not style.has_negative):
        return
    if value is True:
        yield flag
    elif value is False:
        yield "--no-" + flag.lstrip("-")
    elif isinstance(value, Mapping):
        yield from (flag, json.dumps(value, separators=(",", ":")))
    elif isinstance(value, list | tuple):
        if style.repeats:
            for item in value:
                yield from (flag, str(item))
        else:
            yield flag
            yield from map(str, value)
    else:
        yield from (flag, str(value))


def _flag(name: str, style: FlagStyle) -> str:
    if name.startswith("-"):
        return name
    name = name.replace("_", "-")
    return ("-" if name in style.short else "--") + name
