"""A quantised GGUF file stays in its codes: fewer bytes, the same model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig

from spillover import LLM, SamplingParams
from spillover.engine.config import EngineConfig
from spillover.engine.planned import plan_model
from spillover.errors import CheckpointError
from spillover.kernels import native
from spillover.kernels.formats.coded_cuda import GgufCuda, tile_form
from spillover.kernels.formats.gguf_codes import CODE_FORMS, GgufCodes
from spillover.kernels.linear import unpack
from spillover.models.checkpoint import open_checkpoint
from spillover.models.loader import PartReader
from spillover.models.registry import architecture
from spillover.models.weight_specs import WeightSpecs, dequantized_experts, in_codes, kept_on, part_nbytes
from support.models.coded_weights import KINDS, stored
from support.models.gguf_cases import CASES, FIELDS, SHAPE, random_model
from support.models.gguf_models import mixed, write_tiled_llama, write_tiled_mixture
from support.models.gguf_writing import write_like_llama_cpp
from support.models.k_quants import quantize_more, write_q4_k_m
from support.models.loading import load_weights
from support.plan_shapes import GPU

DENSE = ["llama", "llama with biases, tied", "qwen2", "qwen3"]
needs_codes = pytest.mark.skipif(not native.multiplies_codes(), reason="this CPU does not multiply codes")


def quantised(case: str, folder: Path, kind: Kind, **other: Kind) -> Path:
    """Write a model; `other`: the types of tensors whose names contain the keyword."""
    arch, config, fields = CASES[case]
    shape = {"block_count": 2, "context_length": 256, "embedding_length": 64, "feed_forward_length": 96,
             "attention.head_count": 4, "attention.head_count_kv": 2, "rope.freq_base": 10000.0,
             "attention.layer_norm_rms_epsilon": 1e-5}

    def choose(name: str, dimensions: int) -> Kind:
        found = [given for part, given in other.items() if part in name]
        return (found or [kind])[0] if dimensions == 2 else Kind.F32

    return write_like_llama_cpp(folder / "m.gguf", random_model(config), arch, shape | fields, kind, choose)


def loaded(path: Path, keep: bool) -> tuple[WeightSpecs, dict[str, dict[str, Any]]]:
    with open_checkpoint(path) as checkpoint:
        arch = architecture(checkpoint.config)
        config = arch.config(checkpoint.config)
        specs = arch.weight_specs(config)
        if keep:
            specs = in_codes(specs, checkpoint.config["codes"])
        weights = load_weights(checkpoint, config, specs, torch.float32, torch.device("cpu"))
        return specs, {part: dict(named) for part, named in weights.parts.items()}


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q8_0, Kind.MXFP4])
@pytest.mark.parametrize("case", DENSE)
def test_weights_in_codes_are_those_that_are_widened(case: str, kind: Kind, tmp_path: Path) -> None:
    path = quantised(case, tmp_path, kind)
    specs, kept = loaded(path, keep=True)
    _, widened = loaded(path, keep=False)
    coded = 0
    for part, named in widened.items():
        for spec in specs[part]:
            found = kept[part][spec.name]
            assert torch.equal(unpack(found), unpack(named[spec.name])), f"{part}.{spec.name}"
            if spec.format is not None:
                matrices = len(spec.sources[0].names)
                in_codes = found.format == GgufCodes((CODE_FORMS[kind.name],) * matrices)
                assert in_codes == isinstance(spec.format, GgufCodes)
            coded += isinstance(spec.format, GgufCodes)
        counted = kept_on(specs, "cpu", "float32")[part]
        assert sum(weight.nbytes for weight in kept[part].values()) == part_nbytes(counted, "float32"), part
    assert coded >= 8  # four matrices per layer, two layers


def test_matrices_that_are_joined_stay_in_codes_only_if_all_are_in_codes(tmp_path: Path) -> None:
    specs, kept = loaded(quantised("qwen2", tmp_path, Kind.Q4_1, attn_v=Kind.Q8_0, ffn_up=Kind.F16), keep=True)
    forms = {spec.name: getattr(spec.format, "forms", None) for spec in specs["layers.0"]}
    four, eight = CODE_FORMS["Q4_1"], CODE_FORMS["Q8_0"]
    assert (forms["qkv"], forms["o"], forms["gate_up"], forms["down"]) == ((four, four, eight), (four,), None, (four,))
    assert not isinstance(kept["layers.0"]["gate_up"].format, GgufCodes)


def test_what_is_no_matrix_of_codes_is_not_read_as_one(tmp_path: Path) -> None:
    with open_checkpoint(quantised("llama", tmp_path, Kind.Q4_0, ffn_up=Kind.F16)) as checkpoint:
        for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight"):
            with pytest.raises(CheckpointError, match=f"{name} is not stored in codes"):
                checkpoint.read_codes(name)


def test_experts_stay_in_codes(tmp_path: Path) -> None:
    for case in ("mixtral", "qwen3moe"):
        path = quantised(case, tmp_path, Kind.Q5_0, ffn_gate_inp=Kind.F32)
        specs, kept = loaded(path, keep=True)
        _, widened = loaded(path, keep=False)
        for name, matrices in (("experts.gate_up", 2), ("experts.down", 1)):
            found, plain = kept["layers.1"][name], widened["layers.1"][name]
            assert found.format == GgufCodes((CODE_FORMS["Q5_0"],) * matrices)
            for expert in range(4):
                assert torch.equal(unpack(found.expert(expert)), unpack(plain.expert(expert)))
        counted = part_nbytes(kept_on(specs, "cpu", "float32")["layers.1"], "float32")
        assert counted == sum(weight.nbytes for weight in kept["layers.1"].values())


@needs_codes
@pytest.mark.parametrize("case", [*DENSE, "mixtral", "qwen3moe"])
@pytest.mark.parametrize("offload", [None, 1e-5])
def test_greedy_tokens_are_those_of_widened_weights(case: str, offload: float | None, tmp_path: Path) -> None:
    path = quantised(case, tmp_path, Kind.Q4_1, output=Kind.Q8_0, token_embd=Kind.Q8_0)
    prompts = [[(7 * i + j) % 96 for j in range(3 + 5 * i)] for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    answers = {}
    for codes in ("keep", "widen"):
        with LLM(str(path), skip_tokenizer_init=True, max_model_len=128, max_num_batched_tokens=24,
                 gpu_memory="64MB", weight_codes=codes, cpu_offload_gb=offload) as llm:
            assert (llm.plan.placement is not None) == (offload is not None)
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            answers[codes] = [output.outputs[0].token_ids for output in outputs]
    assert answers["keep"] == answers["widen"]


@needs_codes
def test_a_plan_counts_codes(tmp_path: Path) -> None:
    path = str(quantised("llama", tmp_path, Kind.Q4_1))
    plans = {}
    for config in (EngineConfig(model=path), EngineConfig(model=path, weight_codes="widen"),
                   EngineConfig(model=path, load_format="dummy"), EngineConfig(model=path, dtype="bfloat16")):
        planned = plan_model(config)
        coded = {isinstance(spec.format, GgufCodes) for listed in planned.specs.values() for spec in listed}
        plans[config.weight_codes, config.load_format, config.dtype] = (planned.plan.weight_bytes, coded)
    kept, widened = plans["keep", "auto", "auto"], plans["widen", "auto", "auto"]
    assert kept[1] == {False, True}  # norms are not quantised
    assert all(coded == {False} for name, (_, coded) in plans.items() if name != ("keep", "auto", "auto"))
    assert kept[0] < widened[0] / 3
    assert gguf.GGML_QUANT_SIZES[Kind.Q4_1] == (32, 20)  # the expected counts depend on it


def test_a_plan_for_a_gpu_counts_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan counts codes for a device that multiplies with them; other devices dequantise while loading."""
    path = str(write_tiled_llama(tmp_path / "m.gguf", mixed))
    plans = {}
    for capability in ((9, 0), (8, 0)):
        device = replace(GPU.cuda[0], capability=capability)
        monkeypatch.setattr("spillover.engine.planned.probe", lambda device=device: replace(GPU, cuda=(device,)))
        for codes in ("keep", "widen"):
            planned = plan_model(EngineConfig(model=path, device="cuda", gpu_memory="2GB", weight_codes=codes))
            kept = kept_on(planned.specs, "cuda", "bfloat16", batch_invariant=True)
            plans[capability, codes] = (planned.plan.weight_bytes, planned.in_codes)
            if capability == (9, 0) and codes == "keep":
                formats = {(part, spec.name): spec.format for part, listed in kept.items() for spec in listed
                           if spec.format is not None}
                assert all(isinstance(form, GgufCuda) for form in formats.values())  # also the embedding and the head
                assert len(kept["layers.1"][1].fields("bfloat16")) == 2  # q and k, and v in another type
    # Norms are not quantised.
    norms = 2 * 256 * (2 * 2 + 1)
    four, six = tile_form(CODE_FORMS["Q4_K"]).tile_bytes, tile_form(CODE_FORMS["Q6_K"]).tile_bytes
    tiles = 2 * (16 * 2 * 2 + 8 * 2 * 2 + 32 * 2 * 2 + 16 * 4) + 2 * 6 * 2
    in_six = 6 * 2 + 8 * 2 + 16 * 4
    assert plans[(9, 0), "keep"] == ((tiles - in_six) * four + in_six * six + norms, True)
    assert plans[(9, 0), "widen"] == plans[(8, 0), "widen"] == plans[(8, 0), "keep"] == (
        tiles * 16 * 128 * 2 + norms, False)


def test_experts_whose_sizes_no_grouped_product_takes_are_widened_for_a_gpu(tmp_path: Path) -> None:
    with open_checkpoint(quantised("qwen3moe", tmp_path, Kind.Q8_0)) as checkpoint:
        arch = architecture(checkpoint.config)
        specs = arch.weight_specs(arch.config(checkpoint.config))
        assert in_codes(specs, checkpoint.config["codes"], "cuda") == specs


@pytest.mark.parametrize("kinds", [(kind,) for kind in KINDS] + [
    (Kind.Q4_0, Kind.Q8_0), (Kind.Q4_K, Kind.Q6_K), (Kind.Q6_K, Kind.Q8_0), (Kind.Q4_1, Kind.Q4_0),
    (Kind.IQ4_NL, Kind.Q5_1),
], ids=lambda kinds: " and ".join(kind.name for kind in kinds))
def test_experts_for_a_gpu_are_the_numbers_that_the_package_reads(kinds: tuple[Kind, ...], tmp_path: Path) -> None:
    """Bits are equal, in one format for both products of a layer, whether all experts are read or one alone."""
    path = write_tiled_mixture(tmp_path / "m.gguf", lambda name: kinds[-1] if "down" in name else kinds[0], experts=3,
                               quantize=lambda values, kind: np.stack([stored(kind, *values.shape[1:], seed)
                                                                       for seed in range(len(values))]))
    with open_checkpoint(path) as checkpoint:
        arch = architecture(checkpoint.config)
        config = arch.config(checkpoint.config)
        given = arch.weight_specs(config)
        specs = kept_on(in_codes(given, checkpoint.config["codes"], "cuda"), "cuda", "bfloat16", batch_invariant=True)
        stacks = [spec for spec in specs["layers.0"] if spec.experts]
        assert len({spec.format for spec in stacks}) == 1
        assert dequantized_experts(specs) is None
        bits = 6 if {*kinds} <= {Kind.Q4_0, Kind.Q4_1, Kind.Q4_K} else 11  # per weight, at most
        assert all(8 * spec.nbytes("bfloat16") <= bits * spec.params for spec in stacks)
        listed = {"layers.0": stacks}
        weights = load_weights(checkpoint, config, listed, torch.bfloat16, torch.device("cpu")).parts["layers.0"]
        alone = PartReader(checkpoint, config, listed, torch.bfloat16).expert("layers.0", 2)
        for name, names in (("experts.gate_up", ("gate_proj", "up_proj")), ("experts.down", ("down_proj",))):
            wanted = torch.cat([checkpoint.read(f"model.layers.0.mlp.experts.2.{part}.weight") for part in names])
            for one in (weights[name].expert(2), alone[name].expert(0)):
                assert torch.equal(one.format.dequantize(one, torch.float32), wanted)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL])
def test_quantisers_of_our_own_are_read_by_the_package(kind: Kind) -> None:
    """The package reads values within half a step of a block, which is its range over the number of codes."""
    values = np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)
    values[0, :256] = 0
    found = gguf.dequantize(quantize_more(values, kind), kind)
    steps = {Kind.Q4_K: 15, Kind.Q5_K: 31, Kind.Q6_K: 63, Kind.IQ4_NL: 12}[kind]
    reach = np.abs(values).reshape(6, -1, 32).max(-1, keepdims=True).repeat(32, -1).reshape(values.shape)
    assert (np.abs(found - values) <= 1.3 * reach / steps).all()
    assert (found[0, :256] == 0).all()


@needs_codes
def test_a_file_in_q4_k_m_stays_in_its_codes(tmp_path: Path) -> None:
    """Rows of 256 columns stay in Q4_K and Q6_K, others in llama.cpp's fallback types, also in one joined matrix."""
    arch, _, fields = CASES["llama with biases, tied"]
    config = LlamaConfig(**SHAPE | {"hidden_size": 256, "intermediate_size": 320}, tie_word_embeddings=True)
    shape = FIELDS | {"embedding_length": 256, "feed_forward_length": 320}
    plain = write_like_llama_cpp(tmp_path / "plain.gguf", random_model(config), arch, shape | fields)
    path = write_q4_k_m(plain, tmp_path / "m.gguf")
    specs, kept = loaded(path, keep=True)
    _, widened = loaded(path, keep=False)
    forms = {(part, spec.name): spec.format.forms for part, listed in specs.items() for spec in listed
             if isinstance(spec.format, GgufCodes)}
    assert forms["layers.0", "qkv"] == (CODE_FORMS["Q4_K"], CODE_FORMS["Q4_K"], CODE_FORMS["Q4_K"])
    assert forms["layers.1", "qkv"] == (CODE_FORMS["Q4_K"], CODE_FORMS["Q4_K"], CODE_FORMS["Q6_K"])
    assert (forms["layers.0", "down"], forms["layers.1", "down"]) == ((CODE_FORMS["Q5_0"],), (CODE_FORMS["Q8_0"],))
    for part, named in widened.items():
        for name, weight in named.items():
            assert torch.equal(unpack(kept[part][name]), unpack(weight)), f"{part}.{name}"
    answers = []
    for codes in ("keep", "widen"):
        with LLM(str(path), skip_tokenizer_init=True, max_model_len=64, gpu_memory="64MB", weight_codes=codes) as llm:
            params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
            outputs = llm.generate([{"prompt_token_ids": [3, 1, 4, 1, 5]}], params, use_tqdm=False)
            answers.append(outputs[0].outputs[0].token_ids)
    assert answers[0] == answers[1]
