"""On a CUDA device: models larger than device memory give the tokens of a resident model, within the memory budget.

A token's bits do not depend on the batch; experts that the host computes under --fast are rounded differently, so only
the resulting tokens are compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support import starved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

FLAGS: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "block_size": 16}
_resident: dict[str, starved.Answers] = {}


def resident(name: str, folder: str) -> starved.Answers:
    if name not in _resident:
        _resident[name] = starved.answer(folder, starved.prompts(6), gpu_memory="2GB", weights="resident", **FLAGS)
    return _resident[name]


STRATEGIES = ("demand", "sequential", "experts", "pinned", "host-experts", "experts-lfru")


@pytest.mark.parametrize(("name", "strategy"), [
    (name, strategy) for name in starved.MODELS for strategy in STRATEGIES
    if name != "llama" or "experts" not in strategy  # a dense model has no experts
])
def test_tokens_are_those_of_a_model_that_fits(name: str, strategy: str, tmp_path: Path) -> None:
    strategy, _, policy = strategy.partition("-l")
    folder = starved.write_config(tmp_path, name)
    whole = resident(name, folder)
    flags = {**FLAGS, "weights": strategy, **({"policy": f"l{policy}"} if policy else {})}
    smallest, most = starved.least(folder, **flags), whole.plan.weight_bytes + whole.plan.workspace_bytes
    for budget in (smallest, (smallest + most) // 2):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        found = starved.answer(folder, starved.prompts(6), gpu_memory=str(budget), **flags)
        assert found.plan.placement is not None
        assert found.tokens == whole.tokens
        assert found.traffic.bytes_moved > 0
        assert found.device_bytes <= found.plan.placement.device_bytes
        del found
        assert torch.cuda.memory_allocated() - before < 64 << 20


def test_graphs_change_no_token(tmp_path: Path) -> None:
    folder = starved.write_config(tmp_path, "gpt-oss")
    flags = {**FLAGS, "fast": True, "weights": "experts"}
    flags["gpu_memory"] = str(starved.least(folder, **flags) + 2 * 10**6)
    eager = starved.answer(folder, starved.prompts(1), tokens=60, enforce_eager=True, **flags)
    graphs = starved.answer(folder, starved.prompts(1), tokens=60, **flags)
    assert graphs.tokens == eager.tokens
    assert graphs.traffic.expert_misses > 0
