"""Checkpoints with random tensors in any weight format, as the format itself lists them; nothing is written to disk."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from spillover.kernels.fields import FLOATING, Field
from spillover.models.loader import _stored, _tensors
from spillover.models.registry import architecture
from support.models.paged_model import StateDict

SHAPE: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000, "hidden_act": "silu",
    "max_position_embeddings": 128, "eos_token_id": 2, "tie_word_embeddings": False, "torch_dtype": "float16",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SHAPE, "architectures": ["LlamaForCausalLM"]},
    "mixtral": {**SHAPE, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {**SHAPE, "architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
                "sliding_window": 16},
}


def made_up(name: str, quantization: dict[str, Any] | None = None) -> StateDict:
    """Return the checkpoint of a model of MODELS with this quantisation config."""
    hf = {**MODELS[name], **({} if quantization is None else {"quantization_config": quantization})}
    arch = architecture(hf)
    generator, rng = torch.Generator().manual_seed(0), random.Random(0)
    tensors: dict[str, Tensor] = {}
    for listed in arch.weight_specs(arch.config(hf)).values():
        for spec in listed:
            source = spec.sources[0]
            fields = list(_tensors(spec, source))
            if spec.format is not None and (source.per_expert or not spec.experts):
                for expert in range(spec.experts or 1):
                    for template, rows in zip(source.names, source.rows, strict=True):
                        made = spec.format.readable(template.format(expert=expert), rows, spec.shape[-1])
                        plain = template.format(expert=expert)  # the tensor of a file in which it is not quantised
                        fields += [_stored(field, 0, source.transposed) for field in made
                                   if field.name != plain or field.name == made[0].name]
            for field in fields:
                if field.name not in tensors:
                    tensors[field.name] = _made(field, quantization or {}, generator)
    for key in [key for key, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn]:
        module = key.removesuffix(".weight")
        if module != key and not {f"{module}.weight_scale", f"{module}.weight_scale_inv"} & set(tensors):
            tensors[f"{module}.weight_scale"] = torch.tensor(0.01 + 0.01 * rng.random())
    return StateDict(hf, tensors)


def _made(field: Field, quantization: dict[str, Any], generator: torch.Generator) -> Tensor:
    name, shape = field.name, field.shape
    if name.endswith("g_idx"):
        size = quantization.get("group_size") or quantization["config_groups"]["g"]["weights"]["group_size"]
        groups = torch.arange(shape[0], dtype=torch.int32) // (size if size > 0 else shape[0])
        if quantization.get("desc_act"):
            return groups[torch.randperm(shape[0], generator=generator)].contiguous()
        return groups
    if name.endswith("global_scale"):
        return torch.full(shape, 50.0)
    if name.endswith(("scale", "scales", "scale_inv", "scale_2")):
        if field.dtype == "uint8":
            return torch.randint(118, 122, shape, dtype=torch.uint8, generator=generator)
        return (0.01 + 0.01 * torch.rand(shape, generator=generator)).to(
            torch.float16 if field.dtype == FLOATING else getattr(torch, field.dtype))
    if field.dtype == FLOATING:
        made = torch.randn(shape, generator=generator)
        return 1 + 0.2 * made if "norm" in name else made * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)
    if field.dtype == "float8_e4m3fn":
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return (codes & 0xBF).view(torch.float8_e4m3fn)
    limits = torch.iinfo(getattr(torch, field.dtype))
    return torch.randint(limits.min, limits.max, shape, generator=generator).to(getattr(torch, field.dtype))
