"""A few hundred random requests, valid, invalid and abandoned, all at once; `benchmarks/soak.py` runs thousands."""

from __future__ import annotations

import asyncio

import pytest
from request_shapes import Shapes
from server_process import ServerProcess
from soak import growth, soak


@pytest.mark.parametrize(("load_format", "requests"), [("null", 500), ("auto", 80)])
def test_nothing_breaks_or_leaks(load_format: str, requests: int) -> None:
    with ServerProcess("--load-format", load_format, "--max-model-len", "1024",
                       "--num-gpu-blocks-override", "256") as server:
        shapes = Shapes(seed=1, max_model_len=1024, max_tokens=12)
        findings = asyncio.run(soak(server, shapes, requests, concurrency=64, weigh=False))
        assert not findings.problems, "\n".join(findings.problems[:10])
        assert findings.streams > requests // 10
        assert findings.hung_up > 0


def test_growth_is_measured_from_the_warm_state() -> None:
    def at(requests: int, front: float, engine: float) -> dict[str, float]:
        return {"requests": requests, "front": front, "engine": engine}

    assert not growth([at(50, 10, 10), at(100, 200, 300), at(1000, 219, 324)], warm=100)
    assert len(growth([at(100, 200, 300), at(1000, 250, 400)], warm=100)) == 2
