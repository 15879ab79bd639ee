"""Spillover without its server: an engine that is given whole batches, as `LLM.generate` is.

Compared with the same engine over HTTP, it shows the cost of the front.
"""

from __future__ import annotations

from dataclasses import replace

from spillover.lab.engines.base import Running
from spillover.lab.engines.flags import to_flags
from spillover.lab.engines.process import HOST
from spillover.lab.engines.spillover import STYLE, SpilloverEngine, spill


class InProcessEngine(SpilloverEngine):
    kind = "in-process"

    def command(self, port: int) -> list[str]:
        model = [] if self.spec.model is None else [self.spec.model]
        return [*spill(self.python), "bench", "batches", *model, "--host", HOST, "--port", str(port),
                *to_flags(dict(self.spec.args), STYLE)]

    def start(self) -> Running:
        self._running = replace(super().start(), batches=True)
        return self._running
