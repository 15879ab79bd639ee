"""FP8 checkpoints with one scale per matrix, and those of ModelOpt: values times scales, whatever the scale's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from spillover.errors import CheckpointError
from spillover.kernels import native
from spillover.kernels.fields import LinearShape
from spillover.kernels.formats import fp8_block, mxfp4
from spillover.kernels.formats.base import Linear, Target, WeightFormat
from spillover.kernels.formats.choice import Dequantized
from spillover.kernels.formats.fp4_panels import Fp4Panels
from spillover.kernels.formats.fp8_panels import Fp8Panels
from spillover.kernels.formats.fp8_rows import Fp8Rows
from spillover.kernels.formats.nvfp4 import Nvfp4
from spillover.models.checkpoint import open_checkpoint
from spillover.models.registry import architecture
from spillover.models.weight_specs import kept_on
from spillover.plan.hardware import probe
from spillover.plan.planner import PlanRequest, make_plan
from support.models.hf_reference import greedy, reference_logits
from support.models.paged_model import CPU, PagedModel, StateDict, assert_close, one_thread  # noqa: F401
from support.models.quantized_files import Write, greedy_tokens, quantized_model

PROMPT = list(range(3, 40))
FP8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None,
       "modules_to_not_convert": ["lm_head", "model.layers.1.mlp"]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "model.layers.1.mlp*", "*.gate"],
            "kv_cache_scheme": {"num_bits": 8, "type": "float"}}


def fp8(scale_name: str, per: str = "tensor", shape: Callable[[Tensor], Tensor] = lambda scale: scale) -> Write:
    def write(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if per == "block":
            values, scale = fp8_block.quantize(weight)
            numbers = fp8_block.dequantize(values, scale, torch.float32)
        else:
            scale = weight.abs().amax(1, keepdim=True) / 448 if per == "row" else weight.abs().max() / 448
            values = (weight / scale).to(torch.float8_e4m3fn)
            numbers = values.float() * scale
        return {f"{module}.weight": values, f"{module}.{scale_name}": shape(scale),
                f"{module}.input_scale": torch.ones(())}, numbers
    return write


def nvfp4(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Quantise to NVFP4 as ModelOpt does, with a global scale that multiplies."""
    groups = weight.view(weight.shape[0], -1, 16)
    whole = weight.abs().max() / (448 * 6)
    scales = (groups.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    steps = scales.float() * whole
    values = torch.tensor(mxfp4.VALUES)
    codes = ((groups / steps.unsqueeze(-1)).unsqueeze(-1) - values).abs().argmin(-1)
    numbers = (values[codes] * steps.unsqueeze(-1)).flatten(1)
    flat = codes.flatten(1).to(torch.uint8)
    return {f"{module}.weight": flat[:, 0::2] | flat[:, 1::2] << 4, f"{module}.weight_scale": scales,
            f"{module}.weight_scale_2": whole, f"{module}.input_scale": torch.ones(())}, numbers


def stored_as(form: WeightFormat) -> WeightFormat:
    return form.base if isinstance(form, Fp4Panels | Fp8Panels) else form


def converted(module: str) -> bool:
    return module != "lm_head" and "layers.1.mlp" not in module


CASES: dict[str, tuple[Write, dict[str, Any]]] = {
    "vLLM": (fp8("weight_scale"), FP8 | {"modules_to_not_convert": None,
                                         "ignored_layers": FP8["modules_to_not_convert"]}),
    "transformers": (fp8("weight_scale_inv", shape=lambda scale: scale.reshape(1)), FP8),
    "modelopt": (fp8("weight_scale"), MODELOPT),
    "modelopt nested": (fp8("weight_scale"), {"quant_method": "modelopt", "quantization": {
        "quant_algo": "FP8", "exclude_modules": MODELOPT["ignore"], "kv_cache_quant_algo": "FP8"}}),
    "modelopt rows": (fp8("weight_scale", "row", lambda scale: scale.flatten()),
                      MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}),
    "modelopt blocks": (fp8("weight_scale", "block", lambda scale: scale[:, None, :, None]),
                        MODELOPT | {"quant_algo": "FP8_PB_WO"}),
    "modelopt NVFP4": (nvfp4, MODELOPT | {"quant_algo": "NVFP4", "group_size": 16}),
}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_values_times_scales(case: str) -> None:
    write, quantization = CASES[case]
    model, config, tensors = quantized_model("llama", write, quantization, wanted=converted)
    paged = PagedModel(StateDict(config, tensors))
    linear = paged.weights.parts["layers.0"]["qkv"]
    wanted = torch.cat([model.state_dict()[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(linear.format.dequantize(linear, torch.float32), wanted)
    in_codes = {name: isinstance(stored_as(paged.weights.parts[f"layers.{layer}"][name].format), Nvfp4)
                for layer, name in ((0, "qkv"), (1, "down"))}
    assert in_codes == {"qkv": case == "modelopt NVFP4", "down": False}
    assert_close(paged.step({"a": PROMPT})["a"], reference_logits(model, PROMPT))


@pytest.mark.skipif(native.library() is None, reason=native.describe())
@pytest.mark.parametrize("case", ["vLLM", "modelopt rows", "modelopt blocks"])
@torch.no_grad()
def test_a_cpu_keeps_linears_in_codes_and_rounds_one_that_the_checkpoint_has_wide(case: str) -> None:
    write, quantization = CASES[case]
    model, config, tensors = quantized_model("llama", write, quantization, wanted=converted)
    paged = PagedModel(StateDict(config, tensors))
    wide, plain = (paged.weights.parts[f"layers.{layer}"]["down"] for layer in (0, 1))
    assert isinstance(wide.format, Fp8Panels)
    assert not isinstance(plain.format, Fp8Panels)
    assert plain.nbytes > 3 * wide.nbytes
    name = "model.layers.0.mlp.down_proj.weight"
    exact = model.state_dict()[name] * 1.01
    scales = [key for key in tensors if key.startswith(name) and key != name]
    changed = {key: tensor for key, tensor in tensors.items() if key not in scales} | {name: exact}
    found = PagedModel(StateDict(config, changed)).weights.parts["layers.0"]["down"]
    assert isinstance(found.format, Fp8Panels)
    made = found.format.dequantize(found, torch.float32)
    assert 0 < (made - exact).abs().max() <= exact.abs().max() / 16


@pytest.mark.skipif(not native.multiplies_codes(), reason="this CPU does not multiply codes")
@pytest.mark.parametrize("name", ["llama", "mixtral"])
@torch.no_grad()
def test_a_cpu_multiplies_nvfp4_in_codes_with_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quantization = MODELOPT | {"quant_algo": "NVFP4", "ignore": ["lm_head", "*.gate"]}
    model, config, tensors = quantized_model(name, nvfp4, quantization, wanted=lambda module: module != "lm_head")
    arch = architecture(config)
    parsed = arch.config(config)
    kept = PagedModel(StateDict(config, tensors))
    quantized = ("qkv", "o", *(("experts.gate_up", "experts.down") if name == "mixtral" else ("gate_up", "down")))
    assert {type(kept.weights.parts["layers.0"][key].format) for key in quantized} == {Fp4Panels}
    request = PlanRequest(device="cpu", dtype="float32", max_model_len=64)
    plan = make_plan(request, parsed, arch.weight_specs(parsed), probe())
    assert plan.weight_bytes == sum(w.nbytes for part in kept.weights.parts.values() for w in part.values())
    tokens = greedy_tokens(kept, PROMPT, 16)
    monkeypatch.setattr(Fp4Panels, "serves", lambda shape: False)
    dequantized = PagedModel(StateDict(config, tensors))
    assert {type(dequantized.weights.parts["layers.0"][key].format) for key in quantized} == {Nvfp4}
    assert tokens == greedy_tokens(dequantized, PROMPT, 16) == greedy(model, PROMPT, 16)


@pytest.mark.parametrize(("case", "kept", "on_cuda"), [
    ("vLLM", fp8_block.Fp8Block, fp8_block.Fp8Block), ("modelopt", fp8_block.Fp8Block, fp8_block.Fp8Block),
    ("modelopt rows", Fp8Rows, Dequantized), ("modelopt NVFP4", Nvfp4, Dequantized),
])
@torch.no_grad()
def test_experts_stay_in_codes(case: str, kept: type, on_cuda: type) -> None:
    write, quantization = CASES[case]
    quantization = quantization | {"ignored_layers": ["lm_head", "gate"], "ignore": ["lm_head", "*.gate"]}
    model, config, tensors = quantized_model("mixtral", write, quantization, wanted=lambda module: module != "lm_head")
    paged = PagedModel(StateDict(config, tensors))
    form = paged.weights.parts["layers.0"]["experts.gate_up"].format
    assert isinstance(stored_as(form), kept)
    assert_close(paged.step({"a": PROMPT})["a"], reference_logits(model, PROMPT))
    arch = architecture(config)
    specs = kept_on(arch.weight_specs(arch.config(config)), "cuda", "bfloat16")["layers.0"]
    assert {type(spec.format) for spec in specs if spec.experts} == {on_cuda}


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    """Tokens are those of transformers for blocks of 128 x 128, which it dequantises while loading."""
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
                    "modules_to_not_convert": ["lm_head"]}
    _, config, tensors = quantized_model("llama", fp8("weight_scale_inv", "block"), quantization, wanted=lambda module:
                                         module != "lm_head")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("input_scale")}
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors",
              {"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager",
        quantization_config=FineGrainedFP8Config(dequantize=True)).eval()
    reference.generation_config.eos_token_id = None
    with open_checkpoint(tmp_path) as checkpoint:
        paged = PagedModel(checkpoint)
    assert greedy_tokens(paged, PROMPT, 16) == greedy(reference, PROMPT, 16)


@pytest.mark.parametrize(("change", "says"), [
    ({"quant_algo": "W4A8_AWQ"}, "modelopt weights with quant_algo 'W4A8_AWQ' are not supported"),
    ({"quant_algo": "NVFP4", "group_size": 32}, "group_size 32"), ({"ignore": [1]}, "[1]"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 weights with fmt 'e5m2'"),
    ({"quant_method": "fp8", "activation_scheme": "none"}, "activation_scheme 'none'"),
    ({"quant_method": "fp8", "ignored_layers": {"a": 1}}, "modules_to_not_convert {'a': 1}"),
])
def test_what_is_not_supported_is_named(change: dict[str, Any], says: str) -> None:
    _, config, _ = quantized_model("llama", nvfp4, MODELOPT | change, wanted=lambda module: False)
    with pytest.raises(CheckpointError) as error:
        architecture(config).config(config)
    assert says in str(error.value)


@pytest.mark.parametrize(("case", "name"), [("vLLM", "weight_scale"), ("modelopt NVFP4", "weight_scale_2")])
def test_missing_scales_are_named(case: str, name: str) -> None:
    write, quantization = CASES[case]
    _, config, tensors = quantized_model("llama", write, quantization, wanted=converted)
    del tensors[f"model.layers.0.self_attn.v_proj.{name}"]
    with pytest.raises(CheckpointError, match=rf"no tensor 'model\.layers\.0\.self_attn\.v_proj\.{name}'"):
        PagedModel(StateDict(config, tensors))


@pytest.mark.parametrize("form", [Nvfp4(), Nvfp4(divides=True), Fp8Rows(), fp8_block.FP8_TENSOR])
def test_dummy_weights_have_the_usual_spread(form: Nvfp4 | Fp8Rows | fp8_block.Fp8Block) -> None:
    shape = LinearShape((64, 128), 256)
    w = Linear(form, shape, form.dummy(shape, 0, Target("float32", CPU), torch.Generator().manual_seed(0)))
    assert w.nbytes == sum(field.nbytes for field in form.fields(shape, "float32"))
    numbers = form.dequantize(w, torch.float32)
    assert numbers.isfinite().all()
    assert 0.005 < numbers.std() < 0.05
