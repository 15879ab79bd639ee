"""Opening a model for a person at a terminal: what is fetched and loaded is shown on stderr while it happens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from spillover.cli.progress import bytes_bar
from spillover.engine.config import EngineConfig
from spillover.models.store import resolve
from spillover.plan.planner import Plan

if TYPE_CHECKING:
    from spillover.engine.assemble import PlannedModel
    from spillover.engine.llm import LLM


def look_at(config: EngineConfig) -> PlannedModel:
    """Find the model, fetching it if it is not here yet, and plan for it; loads nothing."""
    from spillover.engine.assemble import plan_model

    fetch(config.model)
    return plan_model(config)


def open_llm(config: EngineConfig, on_plan: Callable[[Plan], None] | None = None) -> LLM:
    from spillover.engine.llm import LLM

    fetch(config.model)
    flags = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    with bytes_bar() as show:
        return LLM(**flags, on_plan=on_plan, progress=lambda done, total, _weight: show("Loading weights", done, total))


def fetch(model: str | None) -> Path:
    with bytes_bar() as show:
        return resolve(model, show)
