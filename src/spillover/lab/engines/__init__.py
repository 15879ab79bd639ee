"""The engines that the lab compares, one file each. To add one, add a file here and a line in `KINDS`.

`make_engine(spec)` returns the adapter; it starts nothing and imports nothing heavy before its `start`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from spillover.errors import SpilloverError, did_you_mean
from spillover.lab.engines.base import CacheReset, Engine, EngineFailed, EngineSpec, Missing, Running
from spillover.lab.engines.needs import unmet
from spillover.lab.engines.shapes import model_path

__all__ = ["KINDS", "CacheReset", "Engine", "EngineFailed", "EngineSpec", "Missing", "Running", "engine_class",
           "make_engine", "missing", "with_path"]

KINDS = {
    "spillover": "spillover.lab.engines.spillover:SpilloverEngine",
    "in-process": "spillover.lab.engines.in_process:InProcessEngine",
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
    """Make an engine. `log_folder`: where its log is kept; without it, a temporary file is used until it stops."""
    return engine_class(spec.kind)(with_path(spec), log_folder)


def missing(spec: EngineSpec) -> Missing | None:
    """Return why this arm must be skipped: its engine or a requirement of its spec is missing. None if it can run."""
    spec = with_path(spec)
    return engine_class(spec.kind).installed(spec) or unmet(spec)


def with_path(spec: EngineSpec) -> EngineSpec:
    """Return the spec with models given as shapes, the drafting one too, replaced by their folders."""
    args, drafting = dict(spec.args), spec.args.get("speculative-config")
    if isinstance(drafting, Mapping) and "model" in drafting:
        args["speculative-config"] = {**drafting, "model": model_path(drafting["model"])}
    return replace(spec, model=model_path(spec.model), args=args)
