"""All of a model's weights at once, read or made up, on one device."""

from __future__ import annotations

import torch

from spillover.models.checkpoint import Checkpoint
from spillover.models.config import ModelConfig
from spillover.models.loader import Progress, dummy_parts, load_parts
from spillover.models.weight_specs import WeightSpecs, kept_on
from spillover.models.weights import ResidentWeights


def load_weights(checkpoint: Checkpoint, config: ModelConfig, specs: WeightSpecs, dtype: torch.dtype,
                 device: torch.device, pack: bool = True, progress: Progress | None = None) -> ResidentWeights:
    """`pack`: in the formats that the device computes with."""
    kept = _kept(specs, dtype, device) if pack else specs
    return ResidentWeights(dict(load_parts(checkpoint, config, kept, dtype, lambda *_: device, progress)))


def dummy_weights(specs: WeightSpecs, dtype: torch.dtype, device: torch.device, seed: int = 0,
                  pack: bool = True) -> ResidentWeights:
    return ResidentWeights(dict(dummy_parts(_kept(specs, dtype, device) if pack else specs, dtype, device, seed)))


def _kept(specs: WeightSpecs, dtype: torch.dtype, device: torch.device) -> WeightSpecs:
    return kept_on(specs, device.type, str(dtype).removeprefix("torch."))
