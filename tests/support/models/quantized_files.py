"""Small models whose linears are rounded to integers, and their tensors as AWQ and GPTQ files store them.

Codes are packed one at a time, following the formats' definitions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from support.models.hf_reference import config_dict, tiny_model
from support.models.paged_model import PagedModel

SPLIT = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}
Write = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]  # module, weight -> tensors, what they represent


@dataclass(frozen=True)
class Rounded:
    """A matrix [N, K] as codes."""

    codes: Tensor  # int64 [N, K]
    zeros: Tensor  # int64 [N, groups]
    scales: Tensor  # [N, groups]
    group_of: Tensor  # int64 [K]

    @property
    def numbers(self) -> Tensor:
        return (self.codes - self.zeros[:, self.group_of]).float() * self.scales[:, self.group_of].float()


def rounded(weight: Tensor, bits: int = 4, group: int = 32, symmetric: bool = False, order: Tensor | None = None,
            dtype: torch.dtype = torch.float16) -> Rounded:
    """Round to nearest. `order`: the order in which columns are assigned to groups; `group` 0: one group for all."""
    rows, columns = weight.shape
    group = group or columns
    order = torch.arange(columns) if order is None else order
    group_of = torch.empty(columns, dtype=torch.int64)
    group_of[order] = torch.arange(columns) // group
    most = (1 << bits) - 1
    scales, zeros = [], []
    for index in range(int(group_of.max()) + 1):
        part = weight[:, group_of == index]
        if symmetric:
            scale = (2 * part.abs().amax(1) / most).to(dtype)
            zero = torch.full((rows,), (most + 1) // 2)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = ((high - low) / most).to(dtype)
            zero = (-low / scale.float()).round().clamp(0, most).long()
        scales.append(scale)
        zeros.append(zero)
    made = torch.stack(scales, 1), torch.stack(zeros, 1)
    codes = (weight / made[0].float()[:, group_of]).round() + made[1][:, group_of]
    return Rounded(codes.clamp(0, most).long(), made[1], made[0], group_of)


def packed(codes: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes [n, m] along the last dimension -> int32; place i of a word holds its code `places[i]`."""
    count = 32 // bits
    words = torch.zeros(codes.shape[0], -(-codes.shape[1] // count), dtype=torch.int64)
    for column in range(words.shape[1]):
        for place, code in enumerate(places or range(count)):
            if column * count + code < codes.shape[1]:
                words[:, column] |= codes[:, column * count + code] << (place * bits)
    return (words - (words >> 31 << 32)).to(torch.int32)


def awq_tensors(module: str, matrix: Rounded, zeros: bool = True) -> dict[str, Tensor]:
    places = (0, 2, 4, 6, 1, 3, 5, 7)
    made = {f"{module}.qweight": packed(matrix.codes.T, 4, places), f"{module}.scales": matrix.scales.T.contiguous()}
    return made | ({f"{module}.qzeros": packed(matrix.zeros.T, 4, places)} if zeros else {})


def gptq_tensors(module: str, matrix: Rounded, bits: int, less_one: bool) -> dict[str, Tensor]:
    zeros = packed(matrix.zeros.T, bits)
    if less_one:
        zeros -= {4: 0x11111111, 8: 0x01010101}[bits]
    return {f"{module}.qweight": packed(matrix.codes, bits).T.contiguous(), f"{module}.qzeros": zeros,
            f"{module}.scales": matrix.scales.T.contiguous(), f"{module}.g_idx": matrix.group_of.int()}


@torch.no_grad()
def quantized_model(name: str, write: Write, quantization: dict[str, Any], seed: int = 4,
                    wanted: Callable[[str], bool] = lambda module: True
                    ) -> tuple[PreTrainedModel, dict[str, Any], dict[str, Tensor]]:
    """Return a model whose linears have the values of their quantised tensors, its config.json, and its tensors as in a
    file. `wanted`: whether a module is quantised, for the projections of all layers and the head."""
    model, _ = tiny_model(name, seed)
    tensors: dict[str, Tensor] = {}

    def add(module: str, weight: Tensor) -> None:
        if wanted(module):
            made, numbers = write(module, weight)
            tensors.update(made)
            weight.copy_(numbers)
        else:
            tensors[f"{module}.weight"] = weight

    for key, value in model.state_dict().items():
        in_files = key.replace(".mlp.", ".block_sparse_moe.") if name == "mixtral" else key
        if value.dim() == 3:
            at, (gate, up, down) = in_files.rsplit(".", 1)[0], SPLIT[name]
            for expert, matrix in enumerate(value):
                pair = dict(zip((gate, up), matrix.chunk(2), strict=True))
                for part, weight in ({down: matrix} if key.endswith("down_proj") else pair).items():
                    add(f"{at}.{expert}.{part}", weight)
        elif key.endswith(("proj.weight", "lm_head.weight")):
            add(in_files.removesuffix(".weight"), value)
        else:
            tensors[in_files] = value
    return model, {**config_dict(model), "quantization_config": quantization}, tensors


def greedy_tokens(model: PagedModel, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that greedy decoding adds to the prompt."""
    tokens, chunk = [], prompt
    for _ in range(count):
        tokens.append(int(model.step({"greedy": chunk})["greedy"][-1].argmax()))
        chunk = tokens[-1:]
    return tokens
