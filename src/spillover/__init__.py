"""Spillover: an LLM inference engine that treats GPU memory as a cache.

    from spillover import LLM, AsyncLLM, SamplingParams
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spillover.engine.llm import LLM
    from spillover.engine.output.outputs import CompletionOutput, RequestOutput
    from spillover.engine.requests.sampling_params import SamplingParams, StructuredOutputs
    from spillover.errors import SpilloverError
    from spillover.server.engine.async_llm import AsyncLLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams", "SpilloverError",
           "StructuredOutputs", "__version__"]

_HOMES = {
    "LLM": "spillover.engine.llm",
    "AsyncLLM": "spillover.server.engine.async_llm",
    "CompletionOutput": "spillover.engine.output.outputs",
    "RequestOutput": "spillover.engine.output.outputs",
    "SamplingParams": "spillover.engine.requests.sampling_params",
    "SpilloverError": "spillover.errors",
    "StructuredOutputs": "spillover.engine.requests.sampling_params",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:  # imports lazily, so that `spill --help` does not wait for torch
    if name not in _HOMES:
        raise AttributeError(f"module 'spillover' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
