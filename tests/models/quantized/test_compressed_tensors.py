"""Checkpoints written by the compressed-tensors package: its own dequantised matrices bit by bit, and the tokens of
transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from spillover.errors import CheckpointError
from spillover.kernels import native
from spillover.kernels.formats.base import Linear
from spillover.kernels.formats.choice import Dequantized
from spillover.kernels.formats.fp4_panels import Fp4Panels
from spillover.kernels.formats.fp8_block import FP8_TENSOR
from spillover.kernels.formats.grouped_int import GroupedInt
from spillover.kernels.formats.mxfp4 import Mxfp4
from spillover.kernels.formats.nvfp4 import Nvfp4
from spillover.models.checkpoint import open_checkpoint
from spillover.models.registry import architecture
from spillover.models.weight_specs import kept_on
from support.models.hf_reference import greedy, reference_logits
from support.models.loading import integers
from support.models.paged_model import PagedModel, StateDict, assert_close, one_thread  # noqa: F401
from support.models.quantized_files import Write, greedy_tokens, quantized_model, rounded

pytest.importorskip("compressed_tensors", reason="needs the compressed-tensors package, which `make` installs")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

PROMPT = list(range(3, 40))
PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "W4A16": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "W4A16 of 16": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 16}),
    "W4A16 zeros": ("pack-quantized", {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 32}),
    "W4A16 rows": ("pack-quantized", {"num_bits": 4, "strategy": "channel", "group_size": -1}),
    "W4A16 static order": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32,
                                              "actorder": "weight"}),
    "W8A16": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 16}),
    "W8A16 zeros rows": ("pack-quantized", {"num_bits": 8, "symmetric": False, "strategy": "channel"}),
    "W8A8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "W8A8 zeros": ("int-quantized", {"num_bits": 8, "symmetric": False, "strategy": "channel"}),
    "W8A8 tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "FP8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "FP8 rows": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "FP8 blocks": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block",
                                       "block_structure": [128, 128]}),
    "naive FP8": ("naive-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "NVFP4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                                       "scale_dtype": "torch.float8_e4m3fn"}),
    "MXFP4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
                                       "scale_dtype": "torch.uint8"}),
}
SMALL = {key: SCHEMES[key] for key in ("W4A16 zeros", "W8A8", "FP8 rows")}  # the cases checked against transformers


def scheme(case: str) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**SCHEMES[case][1]))


def written(case: str, dtype: torch.dtype = torch.bfloat16) -> Write:
    """Return a function that compresses a module with the package, and returns also the decompressed values."""
    args, compressor = scheme(case), BaseCompressor.get_value_from_registry(SCHEMES[case][0])

    def write(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        state = {"weight": weight.to(dtype), **qparams(case, weight, dtype)}
        stored = compressor.compress(state, args)
        numbers = compressor.decompress(stored, args)["weight"]
        return {f"{module}.{name}": tensor for name, tensor in stored.items()}, numbers.float()

    return write


def qparams(case: str, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the scales and zeros of a matrix, rounded to nearest."""
    weights = scheme(case).weights
    if weights.type == "int":
        group = weights.group_size if weights.strategy == "group" else 0
        whole = weight.reshape(1, -1) if weights.strategy == "tensor" else weight
        matrix = rounded(whole, weights.num_bits, group, weights.symmetric, dtype=dtype)
        made = {"weight_scale": matrix.scales[0] if weights.strategy == "tensor" else matrix.scales}
        zeros = (matrix.zeros - (1 << weights.num_bits - 1)).to(torch.int8)
        return made if weights.symmetric else made | {"weight_zero_point": zeros}
    rows, columns = weight.shape
    if case == "NVFP4":
        largest = weight.abs().view(rows, -1, 16).amax(-1)
        whole = 448 * 6 / largest.max()
        return {"weight_scale": (largest / 6 * whole).to(torch.float8_e4m3fn).float(),
                "weight_global_scale": whole.reshape(1)}
    if case == "MXFP4":
        return {"weight_scale": torch.exp2((weight.abs().view(rows, -1, 32).amax(-1) / 6).log2().ceil())}
    if case == "FP8 blocks":
        return {"weight_scale": torch.full((-(-rows // 128), -(-columns // 128)), float(weight.abs().max()) / 448,
                                           dtype=dtype)}
    largest = weight.abs().amax(1, keepdim=True) if weights.strategy == "channel" else weight.abs().max().reshape(1)
    return {"weight_scale": (largest / 448).to(dtype)}


def configured(case: str, **changes: Any) -> dict[str, Any]:
    stored, weights = SCHEMES[case]
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, "dynamic": False, **weights},
             "input_activations": PER_TOKEN if stored == "int-quantized" else None}
    return {"quant_method": "compressed-tensors", "format": stored, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*mlp\\.gate$", "re:.*moe\\.gate$"],
            "kv_cache_scheme": None, **changes}


def bfloat16_config(config: dict[str, Any]) -> dict[str, Any]:
    return config | {"dtype": "bfloat16"}


@pytest.mark.parametrize("case", SCHEMES)
@torch.no_grad()
def test_numbers_are_the_packages_own(case: str) -> None:
    model, config, tensors = quantized_model("llama", written(case), configured(case),
                                             wanted=lambda module: module != "lm_head")
    paged = PagedModel(StateDict(bfloat16_config(config), tensors))
    layer, state = paged.weights.parts["layers.1"], model.state_dict()
    for name, modules in (("qkv", [f"self_attn.{part}_proj" for part in "qkv"]), ("o", ["self_attn.o_proj"]),
                          ("gate_up", ["mlp.gate_proj", "mlp.up_proj"]), ("down", ["mlp.down_proj"])):
        wanted = torch.cat([state[f"model.layers.1.{module}.weight"] for module in modules])
        linear = layer[name]
        found = linear.format.dequantize(linear, torch.float32)
        # The package rounds to the type of the scales; the weights kept here are not rounded.
        assert torch.equal(found.bfloat16(), wanted.bfloat16()), name
        kept = {"pack": GroupedInt, "int-": GroupedInt, "nvfp": Nvfp4, "mxfp": Mxfp4}.get(SCHEMES[case][0][:4])
        form = linear.format.base if isinstance(linear.format, Fp4Panels) else linear.format
        assert kept is None or isinstance(integers(linear) or form, kept)
        in_panels = SCHEMES[case][0].startswith(("nvfp4", "mxfp4")) and native.multiplies_codes()
        assert isinstance(linear.format, Fp4Panels) == in_panels
        assert kept is None or linear.nbytes < wanted.numel() * 1.6


@pytest.mark.parametrize("case", SMALL)
def test_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """In float32, tokens are those of transformers, which decompresses the weights by itself."""
    _, config, tensors = quantized_model("llama", written(case, torch.float32), configured(case),
                                         wanted=lambda module: module != "lm_head")
    config = json.loads(json.dumps(config | {"dtype": "float32", "architectures": ["LlamaForCausalLM"]}, default=str))
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors",
              {"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager",
        quantization_config=CompressedTensorsConfig(dequantize=True)).eval()
    reference.generation_config.eos_token_id = None
    for module in reference.modules():
        module.quantization_enabled = False  # disables activation quantisation, which is not used here
    with open_checkpoint(tmp_path) as checkpoint:
        paged = PagedModel(checkpoint)
    assert_close(paged.step({"a": PROMPT})["a"], reference_logits(reference, PROMPT))
    assert greedy_tokens(paged, PROMPT, 16) == greedy(reference, PROMPT, 16)


@torch.no_grad()
def test_groups_targets_and_ignored_modules() -> None:
    """Names override patterns, and patterns classes; modules that are ignored or in no group are not quantised."""
    groups = {name: configured(case)["config_groups"]["group_0"] | {"targets": targets, "format": SCHEMES[case][0]}
              for name, case, targets in (("a", "W4A16", ["Linear"]), ("b", "FP8 rows", ["re:.*v_proj"]),
                                          ("c", "W8A16", ["model.layers.0.mlp.down_proj", "re:.*layers\\.2\\.self.*"]))}
    ignored = ["re:.*gate_proj", "model.layers.1.self_attn.o_proj", "lm_head"]
    config = configured("W4A16", format="mixed-precision", config_groups=groups, ignore=ignored)

    def case_of(module: str) -> str | None:
        if module == "lm_head" or module.endswith("gate_proj") or module == ignored[1]:
            return None
        if module == "model.layers.0.mlp.down_proj" or "layers.2.self" in module:
            return "W8A16"
        return "FP8 rows" if module.endswith("v_proj") else "W4A16"

    def write(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return written(str(case_of(module)), torch.float32)(module, weight)

    model, config, tensors = quantized_model("llama", write, config, wanted=lambda module: bool(case_of(module)))
    paged = PagedModel(StateDict(config, tensors))
    assert_close(paged.step({"a": PROMPT})["a"], reference_logits(model, PROMPT))
    parts = paged.weights.parts
    assert [getattr(integers(parts[f"layers.{layer}"]["down"]), "bits", 0) for layer in range(3)] == [8, 4, 4]
    assert getattr(integers(parts["layers.2"]["qkv"]), "bits", 0) == 8
    for layer, name in ((0, "qkv"), (0, "gate_up"), (1, "o")):
        assert not integers(parts[f"layers.{layer}"][name])


@torch.no_grad()
def test_activation_order() -> None:
    """Activation order as earlier package versions wrote it is read: codes in column order, and a group index."""
    def write(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        columns = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3))
        matrix = rounded(weight, order=columns, dtype=torch.float32)
        packed = BaseCompressor.get_value_from_registry("pack-quantized")
        args = scheme("W4A16 zeros")
        # Columns sorted by group form an ordinary matrix for the package.
        stored = packed.compress({"weight": matrix.numbers[:, columns], "weight_scale": matrix.scales,
                                  "weight_zero_point": (matrix.zeros - 8).to(torch.int8)}, args)
        unordered = packed.compress({"weight": (matrix.codes - 8).float(), "weight_scale": torch.ones(len(weight), 1)},
                                    scheme("W4A16 rows"))
        stored |= {"weight_packed": unordered["weight_packed"], "weight_g_idx": matrix.group_of.int()}
        return {f"{module}.{name}": tensor for name, tensor in stored.items()}, matrix.numbers

    config = configured("W4A16 zeros")
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    model, config, tensors = quantized_model("llama", write, config, wanted=lambda module: module != "lm_head")
    paged = PagedModel(StateDict(config, tensors))
    assert getattr(integers(paged.weights.parts["layers.0"]["qkv"]), "ordered", False)
    assert_close(paged.step({"a": PROMPT})["a"], reference_logits(model, PROMPT))


@pytest.mark.parametrize(("name", "case", "on_cuda"), [
    ("qwen3_moe", "W4A16 of 16", Dequantized), ("mixtral", "FP8", type(FP8_TENSOR)),
    ("qwen3_moe", "FP8 rows", Dequantized), ("mixtral", "NVFP4", Dequantized),
    ("qwen3_moe", "FP8 blocks", type(FP8_TENSOR)),
])
@torch.no_grad()
def test_experts_stay_in_codes(name: str, case: str, on_cuda: type) -> None:
    model, config, tensors = quantized_model(name, written(case, torch.float32), configured(case),
                                             wanted=lambda module: module != "lm_head")
    paged = PagedModel(StateDict(config, tensors))
    stack: Linear = paged.weights.parts["layers.0"]["experts.gate_up"]
    assert stack.nbytes < stack.shape.out_features * stack.shape.in_features * len(stack.tensors[0]) * 1.6
    if case != "NVFP4":  # the package rounds NVFP4 numbers to bfloat16
        assert_close(paged.step({"a": PROMPT})["a"], reference_logits(model, PROMPT))
    arch = architecture(config)
    specs = kept_on(arch.weight_specs(arch.config(config)), "cuda", "bfloat16")["layers.0"]
    assert {type(spec.format) for spec in specs if spec.experts} == {on_cuda}


@pytest.mark.parametrize(("change", "says"), [
    ({"format": "marlin-24"}, "format 'marlin-24'"), ({"format": None}, "format None"),
    ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    ({"config_groups": {}}, "config_groups {}"), ({"config_groups": {"g": ["W4A16"]}}, "config_groups g ['W4A16']"),
    ({"ignore": ["re:("]}, "target '('"), ({"ignore": "lm_head"}, "ignore 'lm_head'"),
    ({"weights": {"num_bits": 3}}, "num_bits 3"), ({"weights": {"type": "complex"}}, "type 'complex'"),
    ({"weights": {"strategy": "token"}}, "strategy 'token'"), ({"weights": {"group_size": None}}, "group_size None"),
    ({"weights": {"actorder": "up"}}, "actorder 'up'"), ({"weights": {"symmetric": 1}}, "symmetric 1"),
    ({"format": "float-quantized", "weights": {"type": "float", "strategy": "block", "num_bits": 8,
                                               "block_structure": [64, 64]}}, "block_structure [64, 64]"),
    ({"format": "nvfp4-pack-quantized", "weights": {"type": "float", "group_size": 32}}, "group_size 32"),
])
def test_what_is_not_supported_is_named(change: dict[str, Any], says: str) -> None:
    config = configured("W4A16")
    config["config_groups"]["group_0"]["weights"] |= change.get("weights", {})
    config |= {key: value for key, value in change.items() if key != "weights"}
    _, config, _ = quantized_model("llama", written("W4A16"), config, wanted=lambda module: False)
    with pytest.raises(CheckpointError) as error:
        architecture(config).config(config)
    assert says in str(error.value)


def test_kv_cache_schemes_change_no_weight() -> None:
    config = configured("W4A16", kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"})
    _, config, tensors = quantized_model("llama", written("W4A16", torch.float32), config,
                                         wanted=lambda module: module != "lm_head")
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    PagedModel(StateDict(config, tensors))


@pytest.mark.parametrize(("case", "name", "tensor", "says"), [
    ("W4A16", "weight_scale", None, "no tensor 'model.layers.1.self_attn.k_proj.weight_scale'"),
    ("W4A16", "weight_packed", torch.zeros(32, 9, dtype=torch.int32), "has shape [32, 9], expected [32, 8]"),
    ("W4A16 zeros", "weight_zero_point", None, "no tensor 'model.layers.1.self_attn.k_proj.weight_zero_point'"),
    ("W8A8", "weight_scale", torch.ones(31, 1), "has shape [31, 1], expected [32, 1]"),
    ("FP8", "weight_scale", None, "no tensor 'model.layers.1.self_attn.k_proj.weight_scale'"),
    ("FP8", "weight_scale", torch.ones(2), "has shape [2], expected [1]"),
    ("NVFP4", "weight_global_scale", None, "no tensor 'model.layers.1.self_attn.k_proj.weight_global_scale'"),
    ("NVFP4", "weight_scale", torch.ones(32, 4), "holds float32, expected float8_e4m3fn"),
])
def test_malformed_tensors_are_named(case: str, name: str, tensor: Tensor | None, says: str) -> None:
    _, config, tensors = quantized_model("llama", written(case), configured(case),
                                         wanted=lambda module: module != "lm_head")
    key = f"model.layers.1.self_attn.k_proj.{name}"
    del tensors[key]
    if tensor is not None:
        tensors[key] = tensor
    with pytest.raises(CheckpointError) as error:
        PagedModel(StateDict(bfloat16_config(config), tensors))
    assert says in str(error.value)
