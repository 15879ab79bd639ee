"""Spillover itself, started as a user would start it: `spill serve`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

from spillover.lab.engines.base import EngineFailed, EngineSpec, Missing, Running
from spillover.lab.engines.flags import FlagStyle, to_flags
from spillover.lab.engines.metrics_text import total
from spillover.lab.engines.owned import OwnedEngine, has_module, module_version, program_beside
from spillover.lab.engines.process import HOST, is_foreign

STYLE = FlagStyle(repeats=True)
ADMIN: dict[str, Any] = {"enable-admin-routes": True}  # enables the route RESET
_MAIN = "from spillover.cli.main import main; main()"


class SpilloverEngine(OwnedEngine):
    kind = "spillover"
    RESET = "/reset_prefix_cache"
    COUNTERS: ClassVar[dict[str, tuple[str, ...]]] = {
        "prompt_tokens": ("spillover:prompt_tokens",),
        "generation_tokens": ("spillover:generation_tokens",),
        "prefix_queries": ("spillover:prefix_cache_queries",),
        "prefix_hits": ("spillover:prefix_cache_hits",),
        "external_queries": ("spillover:external_prefix_cache_queries",),
        "external_hits": ("spillover:external_prefix_cache_hits",),
        "preemptions": ("spillover:num_preemptions",),
    }

    def __init__(self, spec: EngineSpec, log_folder: Path | None = None) -> None:
        super().__init__(spec, log_folder)
        self._restarts = 0.0

    @property
    def python(self) -> str:
        return self.spec.python or sys.executable

    @classmethod
    def installed(cls, spec: EngineSpec) -> Missing | None:
        python = spec.python or sys.executable
        if not is_foreign(python) or has_module(python, "spillover"):
            return None
        return Missing(f"spillover is not in {python}", "pip install spillover")

    def command(self, port: int) -> list[str]:
        model = [] if self.spec.model is None else [self.spec.model]
        return [*spill(self.python), "serve", *model, "--host", HOST, "--port", str(port),
                *to_flags(ADMIN | dict(self.spec.args), STYLE)]

    def start(self) -> Running:
        running = super().start()
        self._restarts = self._engine_restarts()
        return running

    def check(self) -> None:
        """Raise if an engine process died: its supervisor restarts it, but the run it died in has crashed anyway."""
        super().check()
        if self._running is not None and self._engine_restarts() > self._restarts:
            raise EngineFailed("crash", "spillover's engine process died and was restarted", self.log())

    def version(self) -> str:
        reply = self.get_json("/version")
        return str(reply["version"]) if isinstance(reply, dict) and "version" in reply else module_version(
            self.python, "spillover")

    def _engine_restarts(self) -> float:
        return total(self.metrics(), "spillover:engine_restarts") or 0.0


def spill(python: str) -> list[str]:
    """Return the `spill` command of an environment, or its equivalent where it runs from a source folder."""
    program = program_beside(python, "spill")
    return [program] if program is not None else [python, "-c", _MAIN]
