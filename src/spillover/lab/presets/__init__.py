"""The configurations named by the seeds, usable as arms: `find_preset("vllm-cpu-offload-8")`.

There is one file per engine. A preset is only flags and environment: an experiment may add to it or remove from it.
"""

from __future__ import annotations

from spillover.errors import SpilloverError, did_you_mean
from spillover.lab.presets import llamacpp, sglang, spillover, vllm
from spillover.lab.presets.preset import Preset

__all__ = ["PRESETS", "Preset", "find_preset"]

PRESETS: dict[str, Preset] = {preset.name: preset for engine in (spillover, vllm, sglang, llamacpp)
                              for preset in engine.PRESETS}


def find_preset(name: str) -> Preset:
    if name not in PRESETS:
        raise SpilloverError(f"There is no preset '{name}'{did_you_mean(name, PRESETS) or '; see spill lab list'}")
    return PRESETS[name]
