"""What a configuration means, what a checkpoint must contain, and the errors if it does not."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from spillover.errors import CheckpointError
from spillover.kernels import native
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.linear import unpack
from spillover.models.checkpoint import open_checkpoint
from spillover.models.config import ModelConfig, RopeScaling, parse_rope
from spillover.models.groups import LayerGroup, layer_groups
from spillover.models.loader import _tensors as stored_tensors
from spillover.models.registry import architecture
from spillover.models.weight_specs import part_nbytes
from support.models.hf_reference import all_architectures, reference_logits, save_checkpoint, tiny_model
from support.models.loading import dummy_weights, load_weights
from support.models.paged_model import CPU, PagedModel, StateDict, assert_close, one_thread  # noqa: F401

PROMPT = list(range(3, 40))


def llama_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        **changes,
    }


def parse(hf: dict[str, Any]) -> ModelConfig:
    return architecture(hf).config(hf)


def load(model: Any, config: dict[str, Any], **changes: torch.Tensor | None) -> Any:
    tensors = {**model.state_dict(), **changes}
    checkpoint = StateDict(config, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    arch = architecture(config)
    parsed = arch.config(config)
    return load_weights(checkpoint, parsed, arch.weight_specs(parsed), torch.float32, CPU)


@pytest.mark.parametrize("name", all_architectures())
def test_a_saved_folder_computes_what_the_model_did(name: str, tmp_path: Path) -> None:
    """A saved folder gives the same logits, although names on disk may differ: experts are saved one by one."""
    model, _ = tiny_model(name)
    with open_checkpoint(save_checkpoint(model, tmp_path)) as checkpoint:
        paged = PagedModel(checkpoint)
    assert_close(paged.step({"a": PROMPT})["a"], reference_logits(model, PROMPT))


@pytest.mark.parametrize("name", all_architectures())
def test_specs_count_the_bytes_before_anything_is_read(name: str) -> None:
    model, config = tiny_model(name)
    arch = architecture(config)
    parsed = arch.config(config)
    specs = arch.weight_specs(parsed)
    expected = sum(part_nbytes(listed, "float32") for listed in specs.values())
    assert expected == sum(parameter.nbytes for parameter in model.parameters())
    steps: list[tuple[int, int, str]] = []
    checkpoint = StateDict(config, model.state_dict())
    weights = load_weights(
        checkpoint, parsed, specs, torch.float32, CPU, pack=False, progress=lambda *step: steps.append(step)
    )
    assert weights.nbytes == expected
    assert steps[-1][:2] == (expected, expected)
    assert [done for done, _, _ in steps] == sorted(done for done, _, _ in steps)
    dummy = dummy_weights(specs, torch.float32, CPU, seed=1, pack=False)
    assert dummy.nbytes == expected


def test_a_tied_head_is_the_embedding_itself() -> None:
    model, config = tiny_model("llama_tied_llama3_rope")
    weights = load(model, config)
    assert set(weights.parts["head"]) == {"norm"}
    assert torch.equal(unpack(weights.parts["embed"]["embedding"]), model.get_input_embeddings().weight)


def test_bfloat16_is_close_to_float32() -> None:
    model, config = tiny_model("qwen3")
    arch = architecture(config)
    parsed = arch.config(config)
    paged = PagedModel(StateDict(config, model.state_dict()))
    expected = paged.step({"a": PROMPT})["a"]
    paged = PagedModel(StateDict(config, model.state_dict()))
    paged.weights = load_weights(
        StateDict(config, model.state_dict()), parsed, arch.weight_specs(parsed), torch.bfloat16, CPU
    )
    paged.kv._views = {layer: (view.bfloat16(), group) for layer, (view, group) in paged.kv._views.items()}
    found = paged.step({"a": PROMPT})["a"]
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.99


def test_dummy_weights_are_the_same_for_the_same_seed_and_run() -> None:
    _, config = tiny_model("gpt_oss")
    config["quantization_config"] = {"quant_method": "mxfp4"}
    arch = architecture(config)
    parsed = arch.config(config)
    specs = arch.weight_specs(parsed)
    first, again, other = (dummy_weights(specs, torch.float32, CPU, seed).parts for seed in (1, 1, 2))
    blocks = [parts["layers.1"]["experts.down"].tensors[0] for parts in (first, again, other)]
    assert torch.equal(blocks[0], blocks[1])
    assert not torch.equal(blocks[0], blocks[2])
    assert torch.equal(first["head"]["norm"], torch.ones(parsed.hidden_size))
    paged = PagedModel(StateDict(config, _tensors_of_mxfp4(config)))
    paged.weights = dummy_weights(specs, torch.float32, CPU, 1)
    assert paged.step({"a": PROMPT})["a"].isfinite().all()


def _tensors_of_mxfp4(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    arch = architecture(config)
    specs = arch.weight_specs(arch.config(config))
    return {
        tensor.name: torch.zeros(tensor.shape, dtype=torch.uint8 if tensor.dtype == "uint8" else torch.float32)
        for listed in specs.values()
        for spec in listed
        for tensor in stored_tensors(spec, spec.sources[0])
    }


class OneAtATime(StateDict):
    """Fails if a tensor is read while the one read before is still referenced."""

    def __init__(self, config: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(config, tensors)
        self.last: Callable[[], torch.Tensor | None] = lambda: None

    def read(self, name: str) -> torch.Tensor:
        assert self.last() is None, f"still held while {name} is read"
        tensor = super().read(name)
        self.last = weakref.ref(tensor)
        return tensor


@pytest.mark.parametrize("name", ["llama_biases_linear_rope", "mixtral", "gpt_oss"])
def test_a_tensor_that_was_read_is_let_go_before_the_next(name: str) -> None:
    model, config = tiny_model(name)
    arch = architecture(config)
    parsed = arch.config(config)
    checkpoint = OneAtATime(config, model.double().state_dict())
    weights = load_weights(checkpoint, parsed, arch.weight_specs(parsed), torch.float32, CPU)
    assert weights.nbytes > 0


def test_a_missing_tensor_is_named() -> None:
    model, config = tiny_model("llama")
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load(model, config, **{"model.layers.1.mlp.up_proj.weight": None})


def test_a_wrong_shape_is_named_with_its_file(tmp_path: Path) -> None:
    model, config = tiny_model("llama")
    model.model.layers[2].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(95, 64))
    with open_checkpoint(save_checkpoint(model, tmp_path)) as checkpoint:
        arch = architecture(config)
        parsed = arch.config(config)
        sentence = r"tensor 'model\.layers\.2\.mlp\.up_proj\.weight' has shape \[95, 64\], expected \[96, 64\]"
        with pytest.raises(CheckpointError, match=sentence) as error:
            load_weights(checkpoint, parsed, arch.weight_specs(parsed), torch.float32, CPU)
    assert str(tmp_path) in str(error.value)


def test_whole_numbers_where_a_float_belongs_are_refused() -> None:
    model, config = tiny_model("llama")
    name = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(CheckpointError, match=r"k_proj\.weight' holds int8, expected a floating type"):
        load(model, config, **{name: torch.zeros(32, 64, dtype=torch.int8)})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "'GemmaForCausalLM' is not supported; supported are Llama"),
        ({"architectures": None}, "names no architecture; supported are LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported, only"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is no multiple of 5 key"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantised with 'aqlm' are not supported"),
    ],
)
def test_what_is_not_supported_is_said_in_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        parse(llama_config(**changes))


def test_old_and_new_files_say_the_same_about_rope() -> None:
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    old = parse(llama_config(rope_theta=500000.0, rope_scaling=llama3))
    new = parse(llama_config(rope_parameters={"rope_theta": 500000.0, **llama3}))
    by_type = {kind: {"rope_theta": 500000.0, **llama3} for kind in ("full_attention", "sliding_attention")}
    assert old == new == parse(llama_config(rope_parameters=by_type))
    assert old.rope_theta == 500000.0
    assert old.rope_scaling == RopeScaling("llama3", 8.0, 8192)
    assert parse_rope({"rope_scaling": {"type": "linear", "factor": 2}, "max_position_embeddings": 64}, 1e4) == (
        10_000.0,
        RopeScaling("linear", 2.0, 64),
    )
    by_type["full_attention"] = {"rope_theta": 1.0}
    with pytest.raises(CheckpointError, match="differ between layer types"):
        parse(llama_config(rope_parameters=by_type))


def test_defaults_of_a_sparse_config() -> None:
    parsed = parse(llama_config(num_key_value_heads=None, eos_token_id=[2, 7], torch_dtype="bfloat16"))
    assert (parsed.num_kv_heads, parsed.head_dim, parsed.rope_theta) == (32, 64, 10_000.0)
    assert (parsed.eos_token_ids, parsed.dtype) == ((2, 7), "bfloat16")
    assert parse(llama_config(eos_token_id=2)).eos_token_ids == (2,)
    assert parse(llama_config(eos_token_id=2, generation_eos_token_id=[2, 3])).eos_token_ids == (2, 3)


def test_layers_of_one_window_form_groups_of_equal_size() -> None:
    def groups(*windows: int | None) -> tuple[LayerGroup, ...]:
        hf = llama_config(num_hidden_layers=len(windows))
        return layer_groups(ModelConfig(**{**parse(hf).__dict__, "windows": windows}))

    assert groups(None, None) == (LayerGroup((0, 1), None),)
    assert groups(8, None, 8, None) == (LayerGroup((1, 3), None), LayerGroup((0, 2), 8))
    assert groups(None, None, None, None, 8, 8) == (
        LayerGroup((0, 1), None),
        LayerGroup((2, 3), None),
        LayerGroup((4, 5), 8),
    )


def test_packing_is_only_for_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    model, config = tiny_model("mixtral")
    weights = load(model, config)
    layer = weights.parts["layers.0"]
    assert layer["qkv"].format == layer["experts.gate_up"].format == DENSE
    assert torch.equal(layer["experts.gate_up"].tensors[0], model.model.layers[0].mlp.experts.gate_up_proj)
