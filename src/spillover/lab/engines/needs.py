"""Requirements of a configuration besides its engine: a CUDA device, a package, a build.

The arm is skipped if one is not met, never emulated: an engine that ignores an unknown switch would be measured without
it. Requirements come from the spec's preset, and from its own flags and environment. Each is one word: `cuda`, `cuda:2`
(devices), `module:lmcache` (in the engine's environment), `vllm-uvm`, `llamacpp-cuda`, or `driver:NAME`, which cannot
be tested for and is declared by the user in SPILLOVER_HAS.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from spillover.errors import SpilloverError
from spillover.lab.engines.base import EngineSpec, Missing
from spillover.lab.engines.owned import cuda_devices, has_module, interpreter, run_python

DECLARED = "SPILLOVER_HAS"


def unmet(spec: EngineSpec) -> Missing | None:
    """Return the first requirement that this machine does not meet; None if it meets all."""
    for need in needs_of(spec):
        name, _, detail = need.partition(":")
        if name not in _CHECKS:
            raise SpilloverError(f"a preset's needs has '{need}', which is unknown; it takes {', '.join(_CHECKS)}")
        absent = _CHECKS[name](spec, detail)
        if absent is not None:
            return absent
    return None


def needs_of(spec: EngineSpec) -> tuple[str, ...]:
    from spillover.lab.presets import find_preset

    needs = list(find_preset(spec.preset).needs) if spec.preset is not None else []
    for (kind, place, name), shown in _SHOWN.items():
        if spec.kind == kind and str((spec.env if place == "env" else spec.args).get(name, "0")) not in ("0", "False"):
            needs += shown
    if spec.kind == "vllm" and "LMCache" in str(spec.args.get("kv-transfer-config", "")):
        needs.append("module:lmcache")
    return tuple(dict.fromkeys(needs))


# Requirements of switches that an engine built without the feature accepts and ignores.
_SHOWN: dict[tuple[str, str, str], tuple[str, ...]] = {
    ("vllm", "env", "VLLM_USE_UVM"): ("cuda", "vllm-uvm"),
    ("llamacpp", "env", "GGML_CUDA_ENABLE_UNIFIED_MEMORY"): ("cuda", "llamacpp-cuda"),
    ("llamacpp", "args", "ncmoe"): ("cuda", "llamacpp-cuda"),
    ("llamacpp", "args", "n-cpu-moe"): ("cuda", "llamacpp-cuda"),
}


def _cuda(_spec: EngineSpec, detail: str) -> Missing | None:
    wanted, found = int(detail or 1), cuda_devices()
    if found >= wanted:
        return None
    return Missing(f"it needs {_devices(wanted)}, and there {'is' if found == 1 else 'are'} {found or 'none'}",
                   f"a machine with {_devices(wanted)} and NVIDIA's driver")


def _module(spec: EngineSpec, detail: str) -> Missing | None:
    python = interpreter(spec)
    return None if has_module(python, detail) else Missing(f"{detail} is not in {python}",
                                                           f"{python} -m pip install {detail}")


def _vllm_uvm(spec: EngineSpec, _detail: str) -> Missing | None:
    code = "import sys, vllm.envs as e; sys.exit('VLLM_USE_UVM' not in e.environment_variables)"
    if run_python(interpreter(spec), code) is not None:
        return None
    return Missing("this vLLM does not know VLLM_USE_UVM and would run without unified memory",
                   "build a vLLM that allocates with cudaMallocManaged under VLLM_USE_UVM=1")


def _llamacpp_cuda(spec: EngineSpec, _detail: str) -> Missing | None:
    from spillover.lab.engines.llamacpp import devices

    if "CUDA" in devices(spec):
        return None
    return Missing("this llama.cpp was built without CUDA and would compute on the host",
                   "cmake -B build -DGGML_CUDA=ON && cmake --build build --target llama-server, and put it on PATH")


def _driver(_spec: EngineSpec, detail: str) -> Missing | None:
    if detail in os.environ.get(DECLARED, "").split(","):
        return None
    return Missing(f"it needs {detail}, which is not part of a stock driver or engine and cannot be detected",
                   f"set {DECLARED}={detail} on a machine that has it")


def _devices(count: int) -> str:
    return "a CUDA device" if count == 1 else f"{count} CUDA devices"


_CHECKS: dict[str, Callable[[EngineSpec, str], Missing | None]] = {
    "cuda": _cuda, "module": _module, "vllm-uvm": _vllm_uvm, "llamacpp-cuda": _llamacpp_cuda, "driver": _driver,
}
