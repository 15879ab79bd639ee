"""Every architecture computes what Hugging Face computes, however prompts are chunked and requests batched."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from spillover.kernels import native
from spillover.kernels.formats.fp4_panels import Fp4Panels
from spillover.kernels.formats.mxfp4 import MXFP4, dequantize, quantize
from support.models.hf_reference import VOCAB, all_architectures, config_dict, greedy, reference_logits, tiny_model
from support.models.paged_model import CPU, PagedModel, StateDict, assert_close, one_thread  # noqa: F401


@pytest.fixture(params=["native", "reference"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select one of the CPU's two implementations: native kernels, or the reference."""
    if request.param == "reference":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("no native kernels here")
    return str(request.param)


@lru_cache
def reference(name: str) -> tuple[Any, StateDict]:
    model, config = tiny_model(name)
    return model, StateDict(config, model.state_dict())


@lru_cache
def prompts_and_logits(name: str) -> tuple[dict[str, list[int]], dict[str, Tensor]]:
    rng = random.Random(7)
    prompts = {str(length): [rng.randrange(1, VOCAB) for _ in range(length)] for length in (1, 37, 16, 53)}
    return prompts, {key: reference_logits(reference(name)[0], prompt) for key, prompt in prompts.items()}


@pytest.mark.parametrize("name", all_architectures())
def test_logits_match_for_several_sequences_in_one_step(name: str, kernels: str) -> None:
    prompts, expected = prompts_and_logits(name)
    found = PagedModel(reference(name)[1]).step(prompts)
    for key in prompts:
        assert_close(found[key], expected[key])


@pytest.mark.parametrize("name", all_architectures())
def test_logits_match_when_prefill_is_chunked_and_mixed_with_decode(name: str, kernels: str) -> None:
    """Logits match if each step takes a different number of tokens per sequence, for one of them a single token."""
    prompts, expected = prompts_and_logits(name)
    paged = PagedModel(reference(name)[1])
    rng = random.Random(11)
    left = {key: list(prompt) for key, prompt in prompts.items()}
    found: dict[str, list[Tensor]] = {key: [] for key in prompts}
    while any(left.values()):
        chunks = {}
        for key, rest in left.items():
            size = 1 if key == "16" else rng.choice((0, 1, 3, 7, 11))
            if rest and size:
                chunks[key], left[key] = rest[:size], rest[size:]
        for key, logits in paged.step(chunks).items() if chunks else ():
            found[key].append(logits)
    for key in prompts:
        assert_close(torch.cat(found[key]), expected[key])


@lru_cache
def greedy_reference(name: str) -> tuple[list[int], list[int]]:
    prompt = prompts_and_logits(name)[0]["37"]
    return prompt, greedy(reference(name)[0], prompt, 64)


@pytest.mark.parametrize("name", all_architectures())
def test_64_greedy_tokens_are_those_of_generate(name: str, kernels: str) -> None:
    prompt, expected = greedy_reference(name)
    paged = PagedModel(reference(name)[1])
    logits = paged.step({"a": prompt})["a"]
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < 64:
        tokens.append(int(paged.step({"a": tokens[-1:]})["a"][-1].argmax()))
    assert tokens == expected


@pytest.mark.parametrize("name", ["llama", "qwen2_sliding", "mixtral", "gpt_oss"])
def test_native_logits_do_not_depend_on_the_batch_or_the_chunks(name: str) -> None:
    """Logits are equal bit for bit, so that greedy tokens do not depend on how the scheduler chunks a prompt."""
    if native.library() is None:
        pytest.skip("no native kernels here")
    prompts, _ = prompts_and_logits(name)
    together = PagedModel(reference(name)[1]).step(prompts)["37"]
    paged = PagedModel(reference(name)[1])
    prompt = prompts["37"]
    pieces = [paged.step({"37": prompt[start : start + 5]})["37"] for start in range(0, len(prompt), 5)]
    assert torch.equal(torch.cat(pieces), together)


def test_mxfp4_experts_stay_as_stored_and_compute_what_their_values_say(kernels: str) -> None:
    model, config = tiny_model("gpt_oss", seed=3)
    tensors = dict(model.state_dict())
    for layer in range(config["num_hidden_layers"]):
        for projection in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{projection}"
            dense = tensors.pop(name)  # [experts, in, out]
            blocks, scales = quantize(dense.transpose(1, 2).contiguous())
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
            dense.copy_(dequantize(blocks, scales, torch.float32).transpose(1, 2))
    checkpoint = StateDict({**config_dict(model), "quantization_config": {"quant_method": "mxfp4"}}, tensors)
    paged = PagedModel(checkpoint)
    layer_weights = paged.weights.parts["layers.0"]
    form = layer_weights["experts.gate_up"].format
    assert (form.base if isinstance(form, Fp4Panels) else form) == MXFP4
    assert {tensor.dtype for tensor in layer_weights["experts.gate_up"].tensors} == {torch.uint8}
    prompt = prompts_and_logits("gpt_oss")[0]["37"]
    assert_close(paged.step({"a": prompt})["a"], reference_logits(model, prompt))
