"""A test on a device without a memory budget gets a small one; a test with its own budget keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spillover.engine.config import EngineConfig
from spillover.engine.planned import plan_checkpoint
from spillover.plan.ranks.cards import find_card
from support.device_share import SHARE, share_device

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16"}


@pytest.mark.parametrize(("flags", "budget"), [
    ({}, SHARE), ({"gpu_memory": "3GB"}, 3 * 10**9), ({"num_gpu_blocks_override": 64}, None), ({"device": "cpu"}, None),
])
def test_an_engine_without_a_budget_has_a_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any],
                                                budget: int | None) -> None:
    share_device(monkeypatch)
    card, config = find_card("h100"), EngineConfig(model=str(tmp_path), **{"device": "cuda", **flags})
    plan = plan_checkpoint(config, tmp_path, SMALL, card.rates, machine=card.machine()).plan
    assert plan.budget_bytes == budget
