"""Substitutes: rounded copies of layers that do not stay on the device, with which a second runner drafts.

Everything else, the layers that stay, the embedding, the norms and the head, is shared with the weights themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spillover.engine.config import EngineConfig
from spillover.engine.weights.placed import EngineWeights, FixedWeights
from spillover.errors import SpilloverError
from spillover.kernels.formats.base import Weight
from spillover.models.config import ModelConfig
from spillover.models.loader import Progress, dummy_parts, load_parts
from spillover.models.quantize.scheme import Scheme, make_scheme
from spillover.models.quantize.view import HALVES, matrices, open_quantized, quantized_config
from spillover.models.registry import read_architecture
from spillover.models.weight_specs import WeightSpecs, kept_on
from spillover.plan.planner import Plan
from spillover.plan.substitutes import INSTEAD

GROUP = 64  # columns that share a scale, where it divides every row: half as many cost acceptance, twice as many room

Parts = dict[str, dict[str, Weight]]


@dataclass(frozen=True)
class Substitutes:
    """How copies of a model's layers are made."""

    scheme: Scheme
    config: ModelConfig  # of the model as it would be with all layers rounded
    specs: WeightSpecs  # of the layers

    def of(self, plan: Plan) -> WeightSpecs:
        """Return those of the layers that the plan wants copies of: all that stream, or all where none does."""
        placement = plan.placement
        if placement is None:
            return self.specs
        return {part: listed for part, listed in self.specs.items() if placement.parts[part] != "resident"}


def choose_substitutes(kind: str, config: EngineConfig, hf_config: Mapping[str, Any], path: Path,
                       specs: WeightSpecs) -> Substitutes:
    """Choose how the layers of a checkpoint are rounded. `specs`: of the model itself, as its checkpoint has it."""
    if config.load_format == "null":
        raise SpilloverError(f"--load-format null has no weights that a draft could be made with; {INSTEAD}")
    held = hf_config.get("quantization_config")
    if held:
        method = held.get("quant_method", "a quantisation")
        raise SpilloverError(f"substitutes are made of unquantised weights, and those of {path} are quantised with "
                             f"{method}; {INSTEAD}")
    columns = list(matrices(specs))
    own = str(hf_config.get("dtype") or hf_config.get("torch_dtype")).removeprefix("torch.")
    group = GROUP if all(count % GROUP == 0 for _, count in columns) else None
    scheme = make_scheme(kind, columns, group, (), own if own in HALVES else HALVES[0])
    arch, model = read_architecture(quantized_config(hf_config, scheme), path)
    layers = {part: listed for part, listed in arch.weight_specs(model).items() if part.startswith("layers.")}
    return Substitutes(scheme, model, layers)


def load_substitutes(config: EngineConfig, plan: Plan, substitutes: Substitutes, path: Path,
                     progress: Progress | None = None) -> Parts:
    """Read the layers that the plan wants copies of once more, and round them."""
    device, dtype = torch.device(plan.device), getattr(torch, plan.dtype)
    # Drafts may differ from batch to batch, so that the fastest products serve.
    specs = kept_on(substitutes.of(plan), plan.device, plan.dtype)
    if config.load_format == "dummy":
        return dict(dummy_parts(specs, dtype, device, config.seed))
    with open_quantized(path, substitutes.scheme, device) as checkpoint:
        return dict(load_parts(checkpoint, substitutes.config, specs, dtype, lambda part, spec: device, progress))


class SubstituteWeights(FixedWeights):
    """The weights of a model that drafts: copies of some layers, and all else as the other weights hold it."""

    def __init__(self, weights: EngineWeights, copies: Parts) -> None:
        super().__init__({**weights.resident_parts, **copies})
        self._weights = weights
        self._copied = tuple(copies)

    def move(self, copy: Callable[[Tensor], Tensor], asleep: bool) -> None:
        """Move the copies, and take all else from the other weights, which were moved before."""
        parts, shared = self.parts, self._weights.resident_parts
        self.parts = {part: parts[part] for part in self._copied}
        super().move(copy, asleep)
        moved = self.parts
        super().__init__({part: moved.get(part) or shared[part] for part in parts})

    @property
    def nbytes(self) -> int:
        """Return the bytes of the copies: the rest is counted where it is held."""
        return sum(int(weight.nbytes) for part in self._copied for weight in self.parts[part].values())
