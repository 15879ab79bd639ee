"""Opening of a model in a terminal: downloads and loading are shown on stderr as they happen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from spillover.engine.config import EngineConfig
from spillover.models.hub.store import resolve
from spillover.plan.planner import Plan
from spillover.progress import IMPORTING, MEASURING, Show, stages

if TYPE_CHECKING:
    from spillover.engine.llm import LLM
    from spillover.engine.planned import PlannedModel
    from spillover.plan.rates import Rates


def plan_only(config: EngineConfig) -> PlannedModel:
    """Find the model, downloading it if necessary, and plan for it; loads no weights."""
    with stages() as show:
        resolve(config.model, show)
        show(IMPORTING, 0, 0)
        from spillover.engine.planned import plan_model

        return plan_model(config, progress=_stage_last(show))


def open_llm(config: EngineConfig, on_plan: Callable[[Plan], None] | None = None) -> LLM:
    with stages() as show:
        resolve(config.model, show)
        show(IMPORTING, 0, 0)
        from spillover.engine.llm import LLM

        flags = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
        return LLM(**flags, on_plan=on_plan, progress=_stage_last(show))


def fetch(model: str | None) -> Path:
    with stages() as show:
        return resolve(model, show)


def timed_rates(device: str, disk: Path | None = None) -> Rates:
    """Measure the rates of this machine; takes at least two seconds."""
    with stages() as show:
        show(MEASURING, 0, 0)
        from spillover.plan.measure import measure_rates

        return measure_rates(device, disk=disk)


def _stage_last(show: Show) -> Callable[[int, int, str], None]:
    return lambda done, total, what: show(what, done, total)
