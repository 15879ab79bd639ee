"""Every configuration that the seeds name, ready to be an arm: `find_preset("vllm-cpu-offload-8")`.

One file an engine. A preset is no more than flags and environment: an experiment may add to it or take away.
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
