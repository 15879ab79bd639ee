"""llama.cpp as in seed 002: gpt-oss-120b on a 32 GB card; and for comparison with spillover on the default model."""

from __future__ import annotations

from typing import Any

from spillover.lab.presets.preset import Preset

GPT_OSS = "ggml-org/gpt-oss-120b-GGUF"
# What --gpt-oss-120b-default expands to, without its sampling, with the context of the seed.
DEFAULTS: dict[str, Any] = {"b": 32768, "ub": 2048, "np": 2, "jinja": True, "c": 65536}
UNIFIED = {"GGML_CUDA_ENABLE_UNIFIED_MEMORY": "1"}
CUDA = ("cuda", "llamacpp-cuda")


def _of(name: str, about: str, args: dict[str, Any], env: dict[str, str], needs: tuple[str, ...] = CUDA) -> Preset:
    return Preset(f"llamacpp-{name}", "llamacpp", about, DEFAULTS | args, env, "002", GPT_OSS, needs)


PRESETS = [
    *(_of(f"ncmoe-{layers}", f"experts of {layers} layers computed on the host", {"ncmoe": layers}, {})
      for layers in (32, 64)),
    _of("uvm", "all weights in CUDA unified memory, paged on demand", {"ngl": 99}, UNIFIED),
    _of("uvm-no-graphs", "unified memory, and no CUDA graphs", {"ngl": 99},
        UNIFIED | {"GGML_CUDA_DISABLE_GRAPHS": "1"}),
    _of("uvm-hint", "unified memory with the GPU advised as the preferred place", {"ngl": 99}, UNIFIED,
        (*CUDA, "driver:uvm-preferred-location")),
    _of("uvm-prefetch", "unified memory with a driver that prefetches by an eBPF policy", {"ngl": 99}, UNIFIED,
        (*CUDA, "driver:uvm-ebpf-prefetch")),
    Preset("llamacpp-default", "llamacpp", "default settings, 4 slots of 2,048 tokens", {"np": 4, "c": 8192}),
    Preset("llamacpp-no-cache", "llamacpp", "no prompt cache: every prompt is computed", {
        "np": 4, "c": 8192, "cache-prompt": False, "cache-ram": 0}),
]
