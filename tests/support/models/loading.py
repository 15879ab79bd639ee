"""All weights of a model at once, read or made up, on one device."""

from __future__ import annotations

import torch

from spillover.kernels.formats.base import Linear, Weight
from spillover.kernels.formats.grouped_int import GroupedInt
from spillover.kernels.formats.grouped_panels import GroupedPanels
from spillover.models.checkpoint import Checkpoint
from spillover.models.config import ModelConfig
from spillover.models.loader import Progress, dummy_parts, load_parts
from spillover.models.weight_specs import WeightSpecs, kept_on
from spillover.models.weights import ResidentWeights


def load_weights(checkpoint: Checkpoint, config: ModelConfig, specs: WeightSpecs, dtype: torch.dtype,
                 device: torch.device, pack: bool = True, progress: Progress | None = None) -> ResidentWeights:
    """Load all weights; `pack`: convert them to the formats that the device computes with."""
    kept = _kept(specs, dtype, device) if pack else specs
    return ResidentWeights(dict(load_parts(checkpoint, config, kept, dtype, lambda *_: device, progress)))


def dummy_weights(specs: WeightSpecs, dtype: torch.dtype, device: torch.device, seed: int = 0,
                  pack: bool = True) -> ResidentWeights:
    return ResidentWeights(dict(dummy_parts(_kept(specs, dtype, device) if pack else specs, dtype, device, seed)))


def integers(w: Weight) -> GroupedInt | None:
    """Return the grouped-integer format of a linear, in panels or not; None if it has another format."""
    form = w.format if isinstance(w, Linear) else None
    form = form.base if isinstance(form, GroupedPanels) else form
    return form if isinstance(form, GroupedInt) else None


def _kept(specs: WeightSpecs, dtype: torch.dtype, device: torch.device) -> WeightSpecs:
    return kept_on(specs, device.type, str(dtype).removeprefix("torch."))
