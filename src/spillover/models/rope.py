"""Tables of rotary position embedding: default, linear, llama3 and yarn; float32 for every compute type."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spillover.models.config import ModelConfig, RopeScaling


def rope_tables(config: ModelConfig, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [num_positions, head_dim / 2]; computed on the CPU for the same bits on all devices."""
    frequencies, scale = inverse_frequencies(config)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return (angles.cos() * scale).to(device), (angles.sin() * scale).to(device)


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Return the radians per position for each pair of dimensions [head_dim / 2], and the factor on cos and sin."""
    wavelengths = config.rope_theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return 1.0 / wavelengths, 1.0
    if scaling.kind == "linear":
        return 1.0 / wavelengths / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(1.0 / wavelengths, scaling), 1.0
    return _yarn(wavelengths, scaling, config), _yarn_attention_factor(scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Scale as Llama 3 does: slow dimensions are divided by the factor, fast ones kept, and the others blended."""
    rotations = scaling.original_max_position / (2 * math.pi / frequencies)  # over the original context
    blend = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _yarn(wavelengths: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    dim = config.head_dim

    def dimension_rotating(times: float) -> float:
        """Return the dimension that makes this many rotations over the original context."""
        rotations = scaling.original_max_position / (times * 2 * math.pi)
        return dim * math.log(rotations) / (2 * math.log(config.rope_theta))

    low, high = dimension_rotating(scaling.beta_fast), dimension_rotating(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return stretched / (scaling.factor * wavelengths) + (1 - stretched) / wavelengths


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 1.0 if scaling.factor <= 1 else 0.1 * math.log(scaling.factor) + 1.0
