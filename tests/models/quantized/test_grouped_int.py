"""AWQ and GPTQ checkpoints compute with their codes, zeros and scales, and stay in codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from spillover.errors import CheckpointError
from spillover.kernels.fields import LinearShape
from spillover.kernels.formats.base import Linear, Target, WeightFormat
from spillover.kernels.formats.choice import Dequantized
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.formats.grouped_int import GroupedInt
from spillover.kernels.formats.packed import FLOATS
from spillover.models.checkpoint import open_checkpoint, read_config
from spillover.models.loader import PartReader
from spillover.models.registry import architecture
from spillover.models.weight_specs import WeightSpecs, is_expert, kept_on, part_nbytes
from support.models.hf_reference import greedy, reference_logits
from support.models.loading import dummy_weights, integers, load_weights
from support.models.paged_model import CPU, PagedModel, StateDict, assert_close, one_thread  # noqa: F401
from support.models.quantized_files import (
    Write,
    awq_tensors,
    gptq_tensors,
    greedy_tokens,
    quantized_model,
    rounded,
)

PROMPT = list(range(3, 40))
AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32, "zero_point": True,
       "modules_to_not_convert": None}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False,
        "checkpoint_format": "gptq"}


def awq(zeros: bool = True) -> Write:
    def write(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        matrix = rounded(weight, symmetric=not zeros)
        return awq_tensors(module, matrix, zeros), matrix.numbers
    return write


def gptq(bits: int = 4, group: int = 32, symmetric: bool = True, order: bool = False, less_one: bool = True,
         seed: Callable[[str], int] = lambda module: 0) -> Write:
    def write(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        columns = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed(module)))
        matrix = rounded(weight, bits, group, symmetric, columns if order else None)
        return gptq_tensors(module, matrix, bits, less_one), matrix.numbers
    return write


def in_layers(module: str) -> bool:
    return module != "lm_head"


CASES: dict[str, tuple[Write, dict[str, Any]]] = {
    "awq": (awq(), AWQ),
    "awq without zeros": (awq(zeros=False), AWQ | {"zero_point": False}),
    "gptq": (gptq(), GPTQ),
    "gptq zeros": (gptq(symmetric=False), GPTQ | {"sym": False}),
    "gptq v2": (gptq(symmetric=False, less_one=False), GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}),
    "gptq 8 bits": (gptq(8, symmetric=False), GPTQ | {"bits": 8, "sym": False}),
    "gptq rows": (gptq(group=0), GPTQ | {"group_size": -1, "desc_act": True}),
    "gptq ordered": (gptq(order=True), GPTQ | {"desc_act": True}),
    "gptq ordered by matrix": (gptq(order=True, symmetric=False, seed=len), GPTQ | {"desc_act": True, "sym": False}),
    "gptq 8 bits ordered": (gptq(8, order=True), GPTQ | {"bits": 8, "desc_act": True}),
}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_codes_mean_what_they_say(case: str) -> None:
    write, quantization = CASES[case]
    model, config, tensors = quantized_model("llama", write, quantization, wanted=in_layers)
    paged = PagedModel(StateDict(config, tensors))
    layer = paged.weights.parts["layers.1"]
    state = model.state_dict()
    for name, parts in (("qkv", ("q_proj", "k_proj", "v_proj")), ("o", ("o_proj",)),
                        ("gate_up", ("gate_proj", "up_proj"))):
        at = "model.layers.1." + ("self_attn" if name in ("qkv", "o") else "mlp")
        wanted = torch.cat([state[f"{at}.{part}.weight"] for part in parts])
        form = integers(layer[name])
        assert form is not None
        assert layer[name].tensors[0].dtype == torch.uint8
        assert layer[name].nbytes <= wanted.numel() * (form.bits / 8 + 1)
        assert torch.equal(layer[name].format.dequantize(layer[name], torch.float32), wanted), name
    assert_close(paged.step({"a": PROMPT})["a"], reference_logits(model, PROMPT))
    assert greedy_tokens(paged, PROMPT, 12) == greedy(model, PROMPT, 12)
    specs = architecture(config).weight_specs(architecture(config).config(config))
    assert paged.weights.nbytes >= sum(part_nbytes(listed, "float32") for listed in specs.values())
    plain = load_weights(StateDict(config, tensors), architecture(config).config(config), specs, torch.float32, CPU,
                         pack=False)
    assert plain.nbytes == sum(part_nbytes(listed, "float32") for listed in specs.values())


def test_a_last_group_may_be_short() -> None:
    write = gptq(group=40, symmetric=False)
    model, config, tensors = quantized_model("llama", write, GPTQ | {"group_size": 40, "sym": False}, wanted=in_layers)
    assert_close(PagedModel(StateDict(config, tensors)).step({"a": PROMPT})["a"], reference_logits(model, PROMPT))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("case", ["awq", "gptq ordered"])
@torch.no_grad()
def test_experts_stay_in_codes_and_are_read_one_by_one(name: str, case: str, tmp_path: Path) -> None:
    quantization = CASES[case][1] | {"group_size": 16}

    def regrouped(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if case == "awq":
            matrix = rounded(weight, group=16)
            return awq_tensors(module, matrix), matrix.numbers
        matrix = rounded(weight, 4, 16, True, torch.arange(weight.shape[1]).flip(0))
        return gptq_tensors(module, matrix, 4, True), matrix.numbers

    model, config, tensors = quantized_model(name, regrouped, quantization, wanted=in_layers)
    paged = PagedModel(StateDict(config, tensors))
    assert_close(paged.step({"a": PROMPT})["a"], reference_logits(model, PROMPT))
    stack = paged.weights.parts["layers.0"]["experts.down"]
    assert isinstance(stack.format, GroupedInt)
    assert paged.weights.parts["layers.0"]["router"].format.panel_kind in (FLOATS, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    arch = architecture(config)
    parsed = arch.config(config)
    specs = arch.weight_specs(parsed)
    with open_checkpoint(tmp_path) as checkpoint:
        one = PartReader(checkpoint, parsed, specs, torch.float32).expert("layers.0", 2)["experts.down"]
    for tensor, whole in zip(one.tensors, stack.tensors, strict=True):
        assert torch.equal(tensor[0], whole[2])
    # A CUDA device has no product for such experts, so it dequantises them.
    on_cuda = [spec for spec in kept_on(specs, "cuda", "bfloat16")["layers.0"] if is_expert(spec.name)]
    assert all(isinstance(spec.format, Dequantized) for spec in on_cuda)
    dense = load_weights(StateDict(config, tensors), parsed, {"layers.0": on_cuda}, torch.float32, CPU, pack=False)
    found = dense.parts["layers.0"]["experts.down"]
    assert torch.equal(found.tensors[0][2], stack.format.dequantize(stack.expert(2), torch.float32))


def test_modules_that_are_not_quantised() -> None:
    def wanted(module: str) -> bool:
        return in_layers(module) and "layers.2" not in module and not module.endswith("k_proj")

    listed = AWQ | {"modules_to_not_convert": ["model.layers.2", "k_proj"]}
    model, config, tensors = quantized_model("llama", awq(), listed, wanted=wanted)
    paged = PagedModel(StateDict(config, tensors))
    assert_close(paged.step({"a": PROMPT})["a"], reference_logits(model, PROMPT))
    first, last = paged.weights.parts["layers.0"], paged.weights.parts["layers.2"]
    assert integers(first["o"])
    for dense in (first["qkv"], last["qkv"], last["o"]):  # in the first, one of the fused three is not quantised
        assert not integers(dense)


def test_dynamic_overrides() -> None:
    """The first pattern that matches a module decides on bits, group and exclusion; the head may be quantised too."""
    dynamic = {"-:.*layers\\.2\\..*": {}, "+:.*\\.(up|down)_proj$": {"bits": 8, "group_size": 16},
               ".*o_proj": {"sym": False}}
    config = GPTQ | {"dynamic": dynamic, "lm_head": True}

    def write(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if module.endswith(("up_proj", "down_proj")):
            return gptq(8, 16)(module, weight)
        return gptq(symmetric=not module.endswith("o_proj"))(module, weight)

    model, config, tensors = quantized_model("llama", write, config, wanted=lambda module: "layers.2" not in module)
    paged = PagedModel(StateDict(config, tensors))
    assert_close(paged.step({"a": PROMPT})["a"], reference_logits(model, PROMPT))
    first, head = paged.weights.parts["layers.0"], paged.weights.parts["head"]
    down, qkv, o = (integers(first[name]) for name in ("down", "qkv", "o"))
    assert down is not None
    assert qkv is not None
    assert o is not None
    assert (down.bits, down.group, qkv.bits, o.zeros) == (8, 16, 4, True)
    assert integers(head["lm_head"])
    assert not integers(first["gate_up"])  # its two matrices have different formats
    assert not integers(paged.weights.parts["layers.2"]["o"])


def test_experts_of_two_formats_are_dequantised() -> None:
    quantization = GPTQ | {"group_size": 16, "dynamic": {"+:.*down_proj$": {"bits": 8}, "-:.*layers\\.0\\.mlp.*": {}}}

    def write(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return gptq(8 if module.endswith("down_proj") else 4, 16)(module, weight)

    model, config, tensors = quantized_model("qwen3_moe", write, quantization, wanted=lambda module: (
        in_layers(module) and ("layers.0.mlp" not in module or module.endswith("down_proj"))))
    paged = PagedModel(StateDict(config, tensors))
    assert_close(paged.step({"a": PROMPT})["a"], reference_logits(model, PROMPT))
    formats = {weight.format for part in paged.weights.parts.values() for name, weight in part.items()
               if name in ("experts.gate_up", "experts.down")}
    assert len(formats) == 1
    assert not any(isinstance(form, GroupedInt) for form in formats)


def test_quantisation_in_a_file_of_its_own(tmp_path: Path) -> None:
    model, config, tensors = quantized_model("llama", gptq(), GPTQ, wanted=in_layers)
    for file, quantization in (("quantize_config.json", {key: GPTQ[key] for key in ("bits", "group_size", "sym")}),
                               ("quant_config.json", {"w_bit": 4, "q_group_size": 64, "version": "GEMM"}),
                               ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}})):
        folder = tmp_path / file
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
        (folder / file).write_text(json.dumps(quantization))
        assert read_config(folder)["quantization_config"] == quantization | {
            "quant_method": {"quantize": "gptq", "quant": "awq", "hf": "modelopt"}[file.split("_")[0]]}
        architecture(read_config(folder)).config(read_config(folder))
    folder = tmp_path / "quantize_config.json"
    save_file(tensors, folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        assert_close(PagedModel(checkpoint).step({"a": PROMPT})["a"], reference_logits(model, PROMPT))


@pytest.mark.parametrize(("change", "says"), [
    ({"bits": 3}, "gptq weights with bits 3 are not supported, only 4 or 8"),
    ({"bits": True}, "bits True"), ({"group_size": 0}, "group_size 0"), ({"group_size": "128"}, "group_size '128'"),
    ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"), ({"dynamic": {"+:(": {}}}, "dynamic '('"),
    ({"dynamic": {"x": {"bits": 2}}}, "bits 2"), ({"sym": "yes"}, "sym 'yes'"),
    ({"modules_in_block_to_quantize": [[3]]}, "modules_in_block_to_quantize [3]"),
    ({"quant_method": "awq", "version": "gemv"}, "awq weights with version 'gemv' are not supported, only gemm"),
    ({"quant_method": "awq", "bits": 8}, "bits 8"), ({"quant_method": "awq", "modules_to_not_convert": "x"}, "'x'"),
    ({"quant_method": "aqlm"}, "weights quantised with 'aqlm' are not supported"),
])
def test_settings_that_are_not_supported_are_named(change: dict[str, Any], says: str) -> None:
    _, config, _ = quantized_model("llama", gptq(), GPTQ | change, wanted=lambda module: False)
    with pytest.raises(CheckpointError) as error:
        architecture(config).weight_specs(architecture(config).config(config))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def changed(name: str, tensor: Tensor | None) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors.pop(name) if tensor is None else tensors.update({name: tensor})
    return change


K_PROJ = "model.layers.1.self_attn.k_proj"


@pytest.mark.parametrize(("change", "says"), [
    (changed(f"{K_PROJ}.scales", None), f"no tensor '{K_PROJ}.scales'"),
    (changed(f"{K_PROJ}.qweight", None), f"no tensor '{K_PROJ}.qweight'"),
    (changed(f"{K_PROJ}.scales", torch.ones(3, 32)), "has shape [3, 32], expected [2, 32]"),
    (changed(f"{K_PROJ}.qweight", torch.zeros(8, 32)), "holds float32, expected int32"),
    (changed(f"{K_PROJ}.qzeros", torch.zeros(2, 4, dtype=torch.int32)), "zeros other than 8, though the configuration"),
    (changed(f"{K_PROJ}.g_idx", torch.arange(64).flip(0).int() // 32), "in another order, though"),
    (changed(f"{K_PROJ}.scales", torch.full((2, 32), 1e-3)), "holds float32 scales that float16 cannot hold"),
])
def test_malformed_tensors_are_named(change: Callable[[dict[str, Tensor]], None], says: str) -> None:
    _, config, tensors = quantized_model("llama", gptq(), GPTQ, wanted=in_layers)
    change(tensors)
    with pytest.raises(CheckpointError) as error:
        PagedModel(StateDict(config, tensors))
    assert says in str(error.value)


def test_an_order_that_fills_groups_unevenly_is_refused() -> None:
    _, config, tensors = quantized_model("llama", gptq(order=True), GPTQ | {"desc_act": True}, wanted=in_layers)
    tensors[f"{K_PROJ}.g_idx"] = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(CheckpointError, match="does not say which 32 columns each group has"):
        PagedModel(StateDict(config, tensors))


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    _, config, tensors = quantized_model("llama", awq(), AWQ, wanted=in_layers)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated: .* download it again"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("form", [GroupedInt(), GroupedInt(8, 0, "float32"), GroupedInt(zeros=True, ordered=True)])
def test_dummy_weights_have_the_usual_spread(form: WeightFormat) -> None:
    shape = LinearShape((64, 128), 256)
    random = torch.Generator().manual_seed(0)
    w = Linear(form, shape, form.dummy(shape, 0, Target("float32", CPU), random))
    assert sum(tensor.nbytes for tensor in w.tensors) == sum(field.nbytes for field in form.fields(shape, "float32"))
    numbers = form.dequantize(w, torch.float32)
    assert 0.01 < numbers.std() < 0.04
    assert numbers.mean().abs() < 0.001
    x = torch.randn(5, 256)
    torch.testing.assert_close(form.linear(x, w), x @ form.dequantize(w, torch.float32).T)


def test_plans_count_codes_and_what_products_take() -> None:
    """Dummy weights take the bytes counted by the specs, and products the scratch bytes, without a file."""
    _, config, _ = quantized_model("llama", awq(), AWQ, wanted=lambda module: False)
    parsed = architecture(config).config(config)
    specs: WeightSpecs = architecture(config).weight_specs(parsed)
    weights = dummy_weights(specs, torch.float32, CPU, pack=False)
    assert weights.nbytes == sum(part_nbytes(listed, "float32") for listed in specs.values())
    o = next(spec for spec in specs["layers.0"] if spec.name == "o")
    assert o.format is not None
    assert o.nbytes("float32") == 64 * 64 // 2 + 64 * 2 * (2 + 1)
    assert o.format.scratch_bytes(o.linear, "float32") == 2 * 64 * 64 * 4
    assert DENSE.scratch_bytes(o.linear, "float32") == 0
