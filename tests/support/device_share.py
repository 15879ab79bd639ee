"""A budget for every engine that a test starts on a device and gives none: by itself it would take all that is free."""

from __future__ import annotations

from typing import Any

import pytest

from spillover.engine import planned
from spillover.plan.request import PlanRequest

SHARE = 2 * 10**9  # bytes; GPU_WORKERS of them fit any device that the tests run on


def share_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan as with `--gpu-memory 2GB`, in this process, wherever neither a budget nor a number of blocks is given."""

    def bounded(**asked: Any) -> PlanRequest:
        if asked["device"] != "cpu" and asked["gpu_memory"] is None and asked["num_gpu_blocks_override"] is None:
            asked["gpu_memory"] = SHARE
        return PlanRequest(**asked)

    monkeypatch.setattr(planned, "PlanRequest", bounded)
