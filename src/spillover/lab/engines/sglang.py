"""SGLang, from the environment named by `python:` or SPILLOVER_SGLANG_PYTHON: `python -m sglang.launch_server`."""

from __future__ import annotations

from typing import Any, ClassVar

from spillover.lab.engines.base import EngineSpec, Missing
from spillover.lab.engines.exported import absent, model_argument
from spillover.lab.engines.flags import FlagStyle, to_flags
from spillover.lab.engines.metrics_text import total
from spillover.lab.engines.owned import OwnedEngine, has_module, interpreter, module_version, not_found
from spillover.lab.engines.process import HOST

STYLE = FlagStyle(has_negative=False)
# Without these flags it has no counters that a run could be checked against.
REPORTING_ARGS: dict[str, Any] = {"enable-metrics": True, "enable-cache-report": True}


class SglangEngine(OwnedEngine):
    kind = "sglang"
    HEALTH = "/health_generate"  # /health answers before the first token can be computed
    RESET = "/flush_cache"
    COUNTERS: ClassVar[dict[str, tuple[str, ...]]] = {
        "prompt_tokens": ("sglang:prompt_tokens",),
        "generation_tokens": ("sglang:generation_tokens",),
        "prefix_queries": ("sglang:prompt_tokens",),  # each prompt token is looked up once
        "prefix_hits": ("sglang:cached_tokens",),
    }
    GAUGES: ClassVar[dict[str, str]] = {"spec_accept_length": "sglang:spec_accept_length",
                                        "spec_accept_rate": "sglang:spec_accept_rate"}

    @classmethod
    def installed(cls, spec: EngineSpec) -> Missing | None:
        if has_module(interpreter(spec), "sglang"):
            return absent(spec.model)
        return not_found(spec, "SGLang", 'pip install "sglang[all]"')

    def command(self, port: int) -> list[str]:
        args = REPORTING_ARGS | dict(self.spec.args)
        return [interpreter(self.spec), "-m", "sglang.launch_server", "--model-path",
                model_argument(self.spec.model, port), "--host", HOST, "--port", str(port), *to_flags(args, STYLE)]

    def version(self) -> str:
        version = self._server_info().get("version")
        return str(version) if version else module_version(interpreter(self.spec), "sglang")

    def device_pool_tokens(self) -> int | None:
        tokens = total(self.metrics(), "sglang:max_total_num_tokens") or self._server_info().get("max_total_num_tokens")
        return int(tokens) if tokens else None

    def _server_info(self) -> dict[str, Any]:
        """Return the server's info; the page was renamed in 2025, so both names are tried."""
        for page in ("/server_info", "/get_server_info"):
            info = self.get_json(page)
            if isinstance(info, dict):
                return info
        return {}
