"""A named configuration of an engine, and its origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A named configuration: `args` as in `engines/flags.py`, `needs` as in `engines/needs.py`.

    Flags are the current ones of the engine. If the document that named a configuration wrote them differently, `about`
    says so.
    """

    name: str
    engine: str
    about: str
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    seed: str | None = None  # number of the document that measured it, 000 to 004
    model: str | None = None  # model measured in that document; an experiment specifies its own
    needs: tuple[str, ...] = ()
