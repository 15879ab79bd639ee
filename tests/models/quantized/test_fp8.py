"""FP8 checkpoints compute with their values times their scales; experts stay as stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from spillover.errors import CheckpointError
from spillover.kernels.formats import fp8_block as fp8
from spillover.kernels.formats.base import DUMMY_STD
from spillover.kernels.formats.fp8_panels import Fp8Panels
from spillover.models.checkpoint import open_checkpoint
from spillover.models.registry import architecture
from spillover.models.weight_specs import part_nbytes
from support.models.hf_reference import config_dict, reference_logits, tiny_model
from support.models.loading import dummy_weights, load_weights
from support.models.paged_model import CPU, PagedModel, StateDict, assert_close, one_thread  # noqa: F401

PROMPT = list(range(3, 40))
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SPLIT = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}


def fp8_model(name: str) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    """Return a model with linears exactly representable in FP8, its config.json, and its tensors as in files."""
    model, _ = tiny_model(name, seed=4)
    tensors: dict[str, Tensor] = {}
    for key, value in model.state_dict().items():
        if value.dim() == 3:
            at = _in_files(name, key.rsplit(".", 1)[0])
            gate, up, down = SPLIT[name]
            for expert, matrix in enumerate(value):
                pair = dict(zip((gate, up), matrix.chunk(2), strict=True))
                for part, weight in ({down: matrix} if key.endswith("down_proj") else pair).items():
                    tensors |= _quantized(f"{at}.{expert}.{part}.weight", weight)
        elif key.endswith("proj.weight"):
            tensors |= _quantized(key, value)
        else:
            tensors[_in_files(name, key)] = value
    return model, {**config_dict(model), "quantization_config": FP8}, tensors


def _in_files(name: str, key: str) -> str:
    return key.replace(".mlp.", ".block_sparse_moe.") if name == "mixtral" else key


def _quantized(name: str, weight: Tensor) -> dict[str, Tensor]:
    values, scales = fp8.quantize(weight.detach() * 3)
    scales = (scales / 3).bfloat16()  # the type that Qwen publishes
    weight.copy_(fp8.dequantize(values, scales.float(), torch.float32))
    return {name: values, f"{name}_scale_inv": scales}


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "qwen3"])
@torch.no_grad()
def test_values_times_scales(name: str, tmp_path: Path) -> None:
    model, config, tensors = fp8_model(name)
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors.values())
    paged = PagedModel(StateDict(config, tensors))
    assert_close(paged.step({"a": PROMPT})["a"], reference_logits(model, PROMPT))
    if name != "qwen3":
        layer = paged.weights.parts["layers.0"]
        for name in ("experts.gate_up", "experts.down"):
            form = layer[name].format
            assert (form.base if isinstance(form, Fp8Panels) else form) == fp8.FP8_BLOCK
            assert layer[name].nbytes < 1.5 * layer[name].shape.out_features * layer[name].shape.in_features * len(
                layer[name].tensors[0])
    specs = architecture(config).weight_specs(architecture(config).config(config))
    plain = load_weights(StateDict(config, tensors), architecture(config).config(config), specs, torch.float32, CPU,
                         pack=False)
    assert plain.nbytes == sum(part_nbytes(listed, "float32") for listed in specs.values())
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert torch.equal(PagedModel(checkpoint).step({"a": PROMPT})["a"], paged.step({"b": PROMPT})["b"])


def test_dummy_weights_are_finite() -> None:
    _, config, _ = fp8_model("qwen3_moe")
    arch = architecture(config)
    parsed = arch.config(config)
    weights = dummy_weights(arch.weight_specs(parsed), torch.float32, CPU).parts["layers.0"]
    down = weights["experts.down"]
    assert down.tensors[0].itemsize == 1
    values = down.format.dequantize(down.expert(0), torch.float32)
    assert values.isfinite().all()
    assert values.std() > 0.1 * DUMMY_STD


def test_blocks_of_another_size_are_refused() -> None:
    _, config, _ = fp8_model("qwen3_moe")
    config["quantization_config"] = FP8 | {"weight_block_size": [64, 64]}
    with pytest.raises(CheckpointError, match=r"weight_block_size \[64, 64\] are not supported, only \[128, 128\]"):
        architecture(config).config(config)


def test_missing_scales_are_named() -> None:
    _, config, tensors = fp8_model("qwen3")
    del tensors["model.layers.1.self_attn.k_proj.weight_scale_inv"]
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.layers\.1\.self_attn\.k_proj\.weight_scale_inv'"):
        PagedModel(StateDict(config, tensors))
