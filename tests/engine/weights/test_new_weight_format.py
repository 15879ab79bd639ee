"""A weight format defined only in this file: its checkpoints load, are planned, move, and give the right tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from spillover.errors import CheckpointError
from spillover.kernels.fields import FLOATING, Field, LinearShape
from spillover.kernels.formats.base import Linear, WeightFormat, register
from spillover.models.registry import architecture
from support import starved

LINEARS = ("proj.weight", "gate.weight")
calls = 0


@register
class Int8Rows(WeightFormat):
    """int8 values [N, K] and a scale per row."""

    quant_method = "int8_rows"

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        return (Field("values", "int8", (shape.out_features, shape.in_features)),
                Field("scales", "float32", (shape.out_features,)))

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        return Field(name, "int8", (rows, columns)), Field(f"{name}_scale", FLOATING, (rows,))

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        values, scales = w.tensors
        return (values.float() * scales[:, None]).to(dtype)

    def linear(self, x: Tensor, w: Linear, bias: Tensor | None = None) -> Tensor:
        global calls
        calls += 1
        return super().linear(x, w, bias)


def write_checkpoints(folder: Path, name: str) -> tuple[str, str]:
    """Write the same weights as two models: dense, and in int8 for all linears of the layers."""
    config: dict[str, Any] = starved.MODELS[name]
    built = architecture(config)
    generator = torch.Generator().manual_seed(0)
    dense: dict[str, Tensor] = {}
    quantized: dict[str, Tensor] = {}
    for spec in (spec for listed in built.weight_specs(built.config(config)).values() for spec in listed):
        source = spec.sources[0]
        for expert in range(spec.experts) if source.per_expert else range(1):
            for key, rows in zip(source.names, source.rows, strict=True):
                tensor, shape = key.format(expert=expert), (rows, *spec.shape[1 + source.per_expert :])
                weight = torch.ones(shape) if "norm" in tensor else 0.05 * torch.randn(shape, generator=generator)
                if tensor.endswith(LINEARS):
                    scales = weight.abs().amax(1) / 127
                    quantized[tensor] = (weight / scales[:, None]).round().to(torch.int8)
                    quantized[f"{tensor}_scale"] = scales
                    weight = quantized[tensor].float() * scales[:, None]
                else:
                    quantized[tensor] = weight
                dense[tensor] = weight
    for kind, tensors, changes in (("dense", dense, {}),
                                   ("int8", quantized, {"quantization_config": {"quant_method": "int8_rows"}})):
        (folder / kind).mkdir()
        (folder / kind / "config.json").write_text(json.dumps({**config, **changes}))
        save_file(tensors, folder / kind / "model.safetensors")
    return str(folder / "dense"), str(folder / "int8")


@pytest.mark.parametrize(("name", "strategies"), [
    ("llama", ["sequential", "demand"]), ("qwen3-moe", ["experts", "host-experts", "sequential"]),
])
def test_a_model_in_it_says_what_its_numbers_say(name: str, strategies: list[str], tmp_path: Path) -> None:
    dense, int8 = write_checkpoints(tmp_path, name)
    wanted = starved.answer(dense, starved.prompts(), load_format="auto")
    before = calls
    found = starved.answer(int8, starved.prompts(), load_format="auto")
    assert found.tokens == wanted.tokens
    assert calls > before
    assert found.device_bytes == found.plan.weight_bytes < wanted.plan.weight_bytes / 2
    for strategy in strategies:
        budget = (starved.least(int8, weights=strategy) + found.plan.weight_bytes + found.plan.workspace_bytes) // 2
        moved = starved.answer(int8, starved.prompts(), load_format="auto", weights=strategy, gpu_memory=str(budget))
        assert moved.plan.placement is not None
        assert moved.tokens == wanted.tokens, strategy
        assert moved.traffic.bytes_moved + moved.traffic.expert_hosted > 0


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    _, int8 = write_checkpoints(tmp_path, "llama")
    config = json.loads((tmp_path / "int8" / "config.json").read_text())
    dense_values = {"quantization_config": {"quant_method": "int8_rows"}}
    (tmp_path / "dense" / "config.json").write_text(json.dumps({**config, **dense_values}))
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.layers\.0\.self_attn\.q_proj\.weight_scale'"):
        starved.answer(str(tmp_path / "dense"), [], load_format="auto")
    assert starved.answer(int8, [], load_format="auto").tokens == []
