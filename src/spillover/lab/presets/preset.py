"""One named configuration of an engine, and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A named configuration: `args` as `engines/flags.py` writes them, `needs` as `engines/needs.py` checks them.

    Flags are those that the engine has today. Where the document that named a configuration wrote it otherwise, `about`
    says so.
    """

    name: str
    engine: str
    about: str
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    seed: str | None = None  # the document that measured it, 000 to 004
    model: str | None = None  # what was measured there; an experiment names its own
    needs: tuple[str, ...] = ()
