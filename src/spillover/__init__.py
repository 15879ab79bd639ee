"""Spillover: an LLM inference engine that treats GPU memory as a cache.

    from spillover import LLM, SamplingParams
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spillover.engine.llm import LLM
    from spillover.engine.outputs import CompletionOutput, RequestOutput
    from spillover.engine.sampling_params import SamplingParams, StructuredOutputs

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputs", "__version__"]

_HOMES = {
    "LLM": "spillover.engine.llm",
    "CompletionOutput": "spillover.engine.outputs",
    "RequestOutput": "spillover.engine.outputs",
    "SamplingParams": "spillover.engine.sampling_params",
    "StructuredOutputs": "spillover.engine.sampling_params",
}


def __getattr__(name: str) -> Any:  # torch is imported when something needs it, so that `spill --help` is quick
    if name not in _HOMES:
        raise AttributeError(f"module 'spillover' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
