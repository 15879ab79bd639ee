"""Substitutes: rounded copies of layers that do not stay on the device, with which a second runner drafts.

Everything else, the layers that stay, the embedding, the norms and the head, is shared with the model's weights. Where
every layer stays, the time of a drafting pass is that of reading weights, so the head gets a rounded copy too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spillover.engine.config import EngineConfig
from spillover.engine.weights.placed import EngineWeights, FixedWeights
from spillover.errors import SpilloverError
from spillover.kernels.formats.base import Weight
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.formats.grouped_int import RoundedInt
from spillover.models.config import ModelConfig
from spillover.models.loader import Progress, dummy_parts, load_parts
from spillover.models.quantize.scheme import Scheme, make_scheme
from spillover.models.quantize.view import HALVES, matrices, open_quantized, quantized_config
from spillover.models.registry import read_architecture
from spillover.models.weight_specs import WeightSpecs, kept_on
from spillover.plan.planner import Plan
from spillover.plan.substitutes import ALTERNATIVE

HEAD_BITS = 8  # bits per weight of the head's copy: with 4 it would choose a different token too often
GROUP = 64  # columns that share a scale, where it divides every row: 128 would cost acceptance, 32 memory

Parts = dict[str, dict[str, Weight]]


@dataclass(frozen=True)
class Substitutes:
    """The description of the rounded copies of a model's layers."""

    scheme: Scheme
    config: ModelConfig  # configuration of the model with all layers rounded
    specs: WeightSpecs  # specs of the copies of the layers, and of the head if it is copied

    def with_head(self, specs: WeightSpecs) -> Substitutes:
        """Return the same with a copy of the head in HEAD_BITS; unchanged if the model's head is quantised already.
        `specs`: those of the model."""
        part = "embed" if self.config.tie_embeddings else "head"
        rounded = RoundedInt(HEAD_BITS, self.scheme.group, self.scheme.dtype)
        copied = [replace(spec, format=rounded) for spec in specs.get(part, ()) if spec.format == DENSE]
        return replace(self, specs={**self.specs, part: copied}) if copied else self

    def of(self, plan: Plan) -> WeightSpecs:
        """Return the specs that the plan needs copies of: parts that are not resident, or all if everything is."""
        placement = plan.placement
        if placement is None:
            return self.specs
        return {part: listed for part, listed in self.specs.items() if placement.parts[part] != "resident"}


def choose_substitutes(kind: str, config: EngineConfig, hf_config: Mapping[str, Any], path: Path,
                       specs: WeightSpecs) -> Substitutes:
    """Choose how the layers of a checkpoint are rounded. `specs`: those of the model as in its checkpoint."""
    if config.load_format == "null":
        raise SpilloverError(f"--load-format null has no weights to make substitutes of; {ALTERNATIVE}")
    held = hf_config.get("quantization_config")
    if held:
        method = held.get("quant_method", "a quantisation")
        raise SpilloverError(f"substitutes need unquantised weights, and those of {path} are quantised with "
                             f"{method}; {ALTERNATIVE}")
    columns = list(matrices(specs))
    own = str(hf_config.get("dtype") or hf_config.get("torch_dtype")).removeprefix("torch.")
    group = GROUP if all(count % GROUP == 0 for _, count in columns) else None
    scheme = make_scheme(kind, columns, group, (), own if own in HALVES else HALVES[0])
    arch, model = read_architecture(quantized_config(hf_config, scheme), path)
    layers = {part: listed for part, listed in arch.weight_specs(model).items() if part.startswith("layers.")}
    return Substitutes(scheme, model, layers)


def load_substitutes(config: EngineConfig, plan: Plan, substitutes: Substitutes, path: Path,
                     progress: Progress | None = None) -> Parts:
    """Read the weights that the plan needs copies of again, rounded."""
    device, dtype = torch.device(plan.device), getattr(torch, plan.dtype)
    # Drafts need not be batch-invariant, so the fastest kernels may be used.
    specs = kept_on(substitutes.of(plan), plan.device, plan.dtype)
    if config.load_format == "dummy":
        return dict(dummy_parts(specs, dtype, device, config.seed))
    with open_quantized(path, substitutes.scheme, device) as checkpoint:
        return dict(load_parts(checkpoint, substitutes.config, specs, dtype, lambda part, spec: device, progress))


class SubstituteWeights(FixedWeights):
    """The weights of a model that drafts: rounded copies of some, and the model's own tensors for all others."""

    def __init__(self, weights: EngineWeights, copies: Parts) -> None:
        super().__init__(_with_copies(weights.resident_parts, copies))
        self._weights = weights
        self._copied = {part: tuple(copied) for part, copied in copies.items()}  # part -> names of the copied weights

    def move(self, copy: Callable[[Tensor], Tensor], asleep: bool) -> None:
        """Move the copies, and refer to the other tensors of the model's weights, which were moved before."""
        self.parts = {**self._copies()}
        super().move(copy, asleep)
        super().__init__(_with_copies(self._weights.resident_parts, self.parts))

    @property
    def nbytes(self) -> int:
        """Return the bytes of the copies; shared tensors are counted with the model's weights."""
        return sum(int(weight.nbytes) for copied in self._copies().values() for weight in copied.values())

    def _copies(self) -> Parts:
        return {part: {name: self.parts[part][name] for name in names} for part, names in self._copied.items()}


def _with_copies(shared: Mapping[str, Mapping[str, Weight]], copies: Mapping[str, Mapping[str, Weight]]) -> Parts:
    """Return all parts, in which copies replace shared weights of the same name."""
    return {part: {**shared.get(part, {}), **copies.get(part, {})} for part in {**shared, **copies}}
