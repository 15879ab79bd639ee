"""The engines that the lab compares, one file each. A new one is a file here and a line in `KINDS`.

`make_engine(spec)` gives the adapter; nothing is started and nothing heavy imported before its `start`.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from spillover.errors import SpilloverError, did_you_mean
from spillover.lab.engines.base import CacheReset, Engine, EngineFailed, EngineSpec, Missing, Running
from spillover.lab.engines.needs import unmet

__all__ = ["KINDS", "CacheReset", "Engine", "EngineFailed", "EngineSpec", "Missing", "Running", "engine_class",
           "make_engine", "missing"]

KINDS = {
    "spillover": "spillover.lab.engines.spillover:SpilloverEngine",
    "vllm": "spillover.lab.engines.vllm:VllmEngine",
    "sglang": "spillover.lab.engines.sglang:SglangEngine",
    "llamacpp": "spillover.lab.engines.llamacpp:LlamaCppEngine",
    "url": "spillover.lab.engines.url:UrlEngine",
}


def engine_class(kind: str) -> type[Engine]:
    if kind not in KINDS:
        raise SpilloverError(f"There is no engine '{kind}'{did_you_mean(kind, KINDS, listed=True)}")
    module, _, name = KINDS[kind].partition(":")
    found: type[Engine] = getattr(importlib.import_module(module), name)
    return found


def make_engine(spec: EngineSpec, log_folder: Path | None = None) -> Engine:
    """Make an engine. `log_folder`: where its log is kept; without one it lies in a temporary file until it stops."""
    return engine_class(spec.kind)(spec, log_folder)


def missing(spec: EngineSpec) -> Missing | None:
    """Return why this arm must be skipped: its engine, or what its configuration needs, is missing. None: it runs."""
    return engine_class(spec.kind).installed(spec) or unmet(spec)
