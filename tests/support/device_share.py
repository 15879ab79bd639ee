"""A memory budget for engines that tests start on a device without one: by default an engine takes all free memory."""

from __future__ import annotations

from typing import Any

import pytest

from spillover.engine import planned
from spillover.plan.request import PlanRequest

SHARE = 2 * 10**9  # bytes of one engine; GPU_WORKERS engines fit on every device that the tests run on


def share_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan as with `--gpu-memory 2GB`, in this process, if neither a budget nor a number of blocks is given."""

    def bounded(**asked: Any) -> PlanRequest:
        if asked["device"] != "cpu" and asked["gpu_memory"] is None and asked["num_gpu_blocks_override"] is None:
            asked["gpu_memory"] = SHARE
        return PlanRequest(**asked)

    monkeypatch.setattr(planned, "PlanRequest", bounded)
