"""Quantised checkpoints move in codes, and give the same tokens wherever their weights are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import starved

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.gate"]}
GPTQ = {"quant_method": "gptq", "bits": 8, "group_size": 64, "desc_act": True, "sym": False, "lm_head": True}


@pytest.mark.parametrize(("name", "quantization", "strategies", "share"), [
    ("qwen3-moe", AWQ, ["experts", "host-experts"], 0.3), ("mixtral", NVFP4, ["experts"], 0.3),
    ("llama", GPTQ, ["sequential"], 0.45),
])
def test_tokens_do_not_depend_on_the_plan(name: str, quantization: dict[str, Any], strategies: list[str], share: float,
                                          tmp_path: Path) -> None:
    dense, codes = tmp_path / "dense", tmp_path / "codes"
    for folder, changes in ((dense, {}), (codes, {"quantization_config": quantization})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**starved.MODELS[name], "num_hidden_layers": 2, **changes}))
    asked = starved.prompts(2)
    wanted = starved.answer(str(codes), asked, tokens=5)
    whole = starved.answer(str(dense), []).plan.weight_bytes
    assert wanted.device_bytes == wanted.plan.weight_bytes < share * whole
    assert len(set(map(tuple, wanted.tokens))) == len(wanted.tokens)
    for strategy in strategies:
        low = starved.least(str(codes), weights=strategy)
        budget = (low + wanted.plan.weight_bytes + wanted.plan.workspace_bytes) // 2
        moved = starved.answer(str(codes), asked, tokens=5, weights=strategy, gpu_memory=str(budget))
        assert moved.plan.placement is not None
        assert moved.tokens == wanted.tokens, strategy
        assert moved.traffic.bytes_moved + moved.traffic.expert_hosted > 0
