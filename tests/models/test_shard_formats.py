"""Quantised weights are cut at groups, packed words and blocks: a sharded model has the values of the whole one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from spillover.errors import SpilloverError
from spillover.kernels import native
from spillover.kernels.formats.base import Linear
from spillover.kernels.formats.coded_cuda import GgufCuda
from spillover.kernels.formats.gguf_codes import GgufCodes
from spillover.kernels.formats.gguf_experts import GgufExperts
from spillover.kernels.linear import unpack
from spillover.models.checkpoint import open_checkpoint
from spillover.models.quantize.view import QuantizedView, choose_scheme, quantized_config
from spillover.models.registry import architecture
from spillover.models.sharding.shard import Shard, shard_specs
from spillover.models.sharding.shard_view import open_shard
from spillover.models.weight_specs import in_codes, kept_on
from support.models.gguf_models import (
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    VOCAB,
    mixed,
    write_tiled_llama,
    write_tiled_mixture,
)
from support.models.loading import load_weights
from support.models.made_up_checkpoint import made_up
from support.models.paged_model import CPU, PagedModel, one_thread  # noqa: F401
from support.rank_threads import ShardedPagedModel

PROMPT = [random.Random(1).randrange(192) for _ in range(21)]


def compressed(stored: str, weights: dict[str, Any]) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "format": stored}
    return {"quant_method": "compressed-tensors", "format": stored, "config_groups": {"g": scheme},
            "ignore": ["lm_head", r"re:.*gate$"]}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int"}
FLOAT8 = {"num_bits": 8, "type": "float"}
FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "group"}
FORMATS: dict[str, dict[str, Any]] = {
    "awq": AWQ,
    "awq without zeros": AWQ | {"zero_point": False},
    "gptq": GPTQ,
    "gptq of 8 bits": GPTQ | {"bits": 8, "lm_head": True},
    "gptq of whole rows": GPTQ | {"group_size": -1},
    "packed": compressed("pack-quantized", INT4),
    "packed with zeros": compressed("pack-quantized", INT4 | {"symmetric": False}),
    "packed of whole rows": compressed("pack-quantized", INT8 | {"strategy": "channel"}),
    "integers": compressed("int-quantized", INT8 | {"strategy": "channel"}),
    "integers with one scale": compressed("int-quantized", INT8 | {"strategy": "tensor"}),
    "fp8": FP8,
    "fp8 with one scale": {"quant_method": "fp8"},
    "fp8 by rows": compressed("float-quantized", FLOAT8 | {"strategy": "channel"}),
    "nvfp4": compressed("nvfp4-pack-quantized", FLOAT4 | {"group_size": 16}),
    "mxfp4": compressed("mxfp4-pack-quantized", FLOAT4 | {"group_size": 32}),
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.gate"]},
}


def assert_same(checkpoint: Any, size: int, expert_parallel: bool) -> None:
    expected = PagedModel(checkpoint).step({"a": PROMPT})["a"]
    found = ShardedPagedModel(checkpoint, size, expert_parallel).step({"a": PROMPT})["a"]
    assert expected.std() > 0.01
    # Random weights may amplify the effect of another order of summation; a wrong cut changes everything.
    assert (found - expected).abs().max() < 0.01 * expected.std()


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("case", FORMATS)
@torch.no_grad()
def test_a_sharded_model_has_the_numbers_of_the_whole(name: str, case: str) -> None:
    assert_same(made_up(name, FORMATS[case]), 2, expert_parallel=False)
    if name == "mixtral":
        assert_same(made_up(name, FORMATS[case]), 2, expert_parallel=True)


@pytest.mark.parametrize("quantization", [{"quant_method": "mxfp4"}, None])
@pytest.mark.parametrize(("size", "expert_parallel"), [(2, False), (4, False), (4, True)])
@torch.no_grad()
def test_gpt_oss_experts_are_cut_with_gate_and_up_in_turn(quantization: dict[str, Any] | None, size: int,
                                                          expert_parallel: bool) -> None:
    assert_same(made_up("gpt_oss", quantization), size, expert_parallel)


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@torch.no_grad()
def test_what_is_quantised_while_it_loads_has_the_codes_of_the_whole(kind: str) -> None:
    plain = made_up("mixtral")
    arch = architecture(plain.config)
    specs = arch.weight_specs(arch.config(plain.config))
    scheme = choose_scheme(kind, plain.config, Path("memory"), specs)
    assert_same(QuantizedView(plain, scheme, specs), 2, expert_parallel=False)
    assert quantized_config(plain.config, scheme)["quantization_config"]


@pytest.mark.parametrize(("quantization", "size", "words"), [
    (GPTQ | {"desc_act": True}, 2, "activation order"),
    (AWQ | {"group_size": 128}, 4, "within a group"),
    (FP8, 4, "within a group"),
])
def test_a_cut_within_a_group_is_refused_in_a_sentence(quantization: dict[str, Any], size: int, words: str) -> None:
    hf = {**made_up("llama").config, "quantization_config": quantization}
    arch = architecture(hf)
    config = arch.config(hf)
    with pytest.raises(SpilloverError, match=words) as refused:
        shard_specs(arch.weight_specs(config), config, Shard(1, size))
    assert "fewer ranks" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0, Kind.Q6_K, mixed])
def test_codes_of_a_gguf_file_are_cut_at_their_blocks(kind: Any, device: str, tmp_path: Path) -> None:
    """Codes are cut at their blocks; matrices whose blocks would be cut are dequantised first."""
    if device == "cpu" and not native.multiplies_codes():
        pytest.skip("this CPU does not multiply codes")
    path = write_tiled_llama(tmp_path / "model.gguf", kind if callable(kind) else lambda _: kind)
    size, dim = 2, HIDDEN // HEADS
    with open_checkpoint(path) as checkpoint:
        arch = architecture(checkpoint.config)
        config = arch.config(checkpoint.config)
        specs = in_codes(arch.weight_specs(config), checkpoint.config["codes"], device)
        whole = load_weights(checkpoint, config, specs, torch.float32, CPU).parts
        for rank in range(size):
            local, cuts = shard_specs(specs, config, Shard(rank, size))
            parts = load_weights(open_shard(checkpoint, cuts), config, local, torch.float32, CPU).parts
            for layer in ("layers.0", "layers.1"):
                found = {name: unpack(weight) for name, weight in parts[layer].items()}
                given = {name: unpack(weight) for name, weight in whole[layer].items()}
                q, k, v = given["qkv"].split_with_sizes([HIDDEN, KV_HEADS * dim, KV_HEADS * dim])
                assert torch.equal(found["qkv"], torch.cat([each.chunk(size)[rank] for each in (q, k, v)]))
                assert torch.equal(found["o"], given["o"].chunk(size, 1)[rank])
                pair = given["gate_up"].split_with_sizes([INNER, INNER])
                assert torch.equal(found["gate_up"], torch.cat([each.chunk(size)[rank] for each in pair]))
                assert torch.equal(found["down"], given["down"].chunk(size, 1)[rank])
                down = parts[layer]["down"]
                assert isinstance(down, Linear)
                assert isinstance(down.format, GgufCodes if device == "cpu" else GgufCuda)
            assert torch.equal(unpack(parts["head"]["lm_head"]), unpack(whole["head"]["lm_head"]).chunk(size)[rank])
            assert VOCAB % size == 0


@pytest.mark.parametrize(("kind", "size", "kept"), [(Kind.Q4_K, 2, False), (Kind.Q4_1, 2, True), (Kind.Q4_1, 4, False)])
def test_experts_in_codes_for_a_cuda_device_are_cut_at_their_blocks(kind: Kind, size: int, kept: bool,
                                                                    tmp_path: Path) -> None:
    """The experts of a layer are dequantised if a cut splits blocks, or leaves no whole tiles, of any of them."""
    path = write_tiled_mixture(tmp_path / "model.gguf", lambda _: kind, experts=3)
    with open_checkpoint(path) as checkpoint:
        arch = architecture(checkpoint.config)
        config = arch.config(checkpoint.config)
        specs = in_codes(arch.weight_specs(config), checkpoint.config["codes"], "cuda")
        whole = load_weights(checkpoint, config, specs, torch.float32, CPU, pack=False).parts["layers.0"]
        for rank in range(size):
            local, cuts = shard_specs(specs, config, Shard(rank, size))
            local = kept_on(local, "cuda", "float32")
            parts = load_weights(open_shard(checkpoint, cuts), config, local, torch.float32, CPU, pack=False).parts
            for name, dim in (("experts.gate_up", 0), ("experts.down", 1)):
                found, given = parts["layers.0"][name], whole[name]
                assert isinstance(found, Linear)
                assert isinstance(given, Linear)
                assert isinstance(found.format, GgufExperts) == kept
                for expert in range(3):
                    one, all_of = unpack(found.expert(expert)), unpack(given.expert(expert))
                    pair = all_of.chunk(2) if dim == 0 else (all_of,)
                    assert torch.equal(one, torch.cat([each.chunk(size, dim)[rank] for each in pair]))
