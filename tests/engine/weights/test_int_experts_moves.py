"""Experts in integer codes give the same tokens on the device, streamed, paged or computed on the host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3MoeConfig

from spillover.kernels.formats.batch_invariant import BatchInvariant
from spillover.kernels.formats.gguf_experts import GgufExperts
from spillover.kernels.formats.int_experts import IntExperts
from support import starved
from support.models import hf_reference
from support.models.coded_weights import KINDS
from support.models.gguf_models import VOCAB, write_tiled_mixture
from support.models.quantized_files import gptq_tensors, quantized_model, rounded

STRATEGIES = ["sequential", "experts", "host-experts"]
PROMPTS = [[(11 * i + 7 * j) % VOCAB for j in range(4 + 9 * i)] for i in range(3)]
TOKENS = 4


def integer_mixture(folder: Path, bits: int, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[list[int]]]:
    """Write a mixture of `bits` whose sizes suit a grouped product; return it and transformers' tokens."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=128, moe_intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, num_experts=24, num_experts_per_tok=2,
        norm_topk_prob=True, decoder_sparse_step=1, max_position_embeddings=256, tie_word_embeddings=False)
    monkeypatch.setitem(hf_reference._CONFIGS, "qwen3_moe", lambda: config)

    def write(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        matrix = rounded(weight * 4, bits, 32, symmetric=True)  # larger weights, so that tokens depend on the experts
        return gptq_tensors(module, matrix, bits, less_one=True), matrix.numbers

    model, written, tensors = quantized_model(
        "qwen3_moe", write, {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": False, "sym": True},
        wanted=lambda module: ".experts." in module or "proj" in module)
    (folder / "config.json").write_text(json.dumps({**written, "torch_dtype": "float32", "eos_token_id": VOCAB - 1}))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder), [hf_reference.greedy(model, ids, TOKENS) for ids in PROMPTS]


def assert_same_under_every_plan(model: str, wanted: list[list[int]] | None, **flags: str) -> starved.Answers:
    whole = starved.answer(model, PROMPTS, TOKENS, load_format="auto", gpu_memory="2GB", weights="resident", **flags)
    assert whole.plan.placement is None
    assert whole.tokens == (wanted or whole.tokens)
    assert len(set(map(tuple, whole.tokens))) == len(whole.tokens)
    for strategy in STRATEGIES:
        low = starved.least(model, load_format="auto", weights=strategy, **flags)
        found = starved.answer(model, PROMPTS, TOKENS, load_format="auto", weights=strategy, gpu_memory=str(low),
                               **flags)
        assert found.plan.placement is not None
        assert found.tokens == whole.tokens, strategy
        assert found.traffic.bytes_moved + found.traffic.expert_hosted > 0
    return whole


def test_integers_on_a_cpu_say_what_transformers_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same_under_every_plan(*integer_mixture(tmp_path, 4, monkeypatch))


needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("bits", [4, 8])
def test_integers_on_a_card(bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = integer_mixture(tmp_path, bits, monkeypatch)
    whole = assert_same_under_every_plan(model, None, device="cuda", dtype="bfloat16")
    assert expert_formats(whole) == {IntExperts}


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("kinds", [(kind, kind) for kind in KINDS] + [(Kind.Q4_K, Kind.Q6_K)],
                         ids=lambda kinds: f"{kinds[0].name} {kinds[1].name}")
def test_gguf_experts_on_a_card(kinds: tuple[Kind, Kind], tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no CUDA device of compute capability 9.0")
    path = write_tiled_mixture(tmp_path / "m.gguf", lambda name: kinds["down" in name], layers=4, experts=24)
    whole = assert_same_under_every_plan(str(path), None, device="cuda", dtype="bfloat16")
    assert expert_formats(whole) <= {IntExperts, GgufExperts}


def expert_formats(found: starved.Answers) -> set[type]:
    """Return the formats of a resident model's experts, unwrapped from the one that fixes the order of summation."""
    formats = [named["experts.down"].format for named in found.weights.parts.values() if "experts.down" in named]
    return {type(form.base if isinstance(form, BatchInvariant) else form) for form in formats}
