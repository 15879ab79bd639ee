"""The units that weights move in, and their bytes: as tensors where they stay, as records where they travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spillover.kernels.fields import aligned
from spillover.models.config import ModelConfig
from spillover.models.weight_specs import WeightSpecs, is_expert, part_nbytes


@dataclass(frozen=True)
class Units:
    parts: Mapping[str, int]  # bytes of each part without its experts, as tensors; in the order of a step
    records: Mapping[str, int]  # the same as one run of bytes
    stacks: Mapping[int, int]  # bytes of a layer's experts, as tensors; layers that have some, in order
    record_bytes: int  # bytes of one expert; 0: there is none
    num_experts: int
    experts_per_token: int
    tied: bool  # the embedding is the head too: a step enters that part twice
    substitutes: Mapping[str, int] = field(default_factory=dict)  # bytes of a part's rounded copy; {}: there is none

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(part for part in self.parts if part.startswith("layers."))

    @property
    def expert_layers(self) -> tuple[int, ...]:
        return tuple(self.stacks)

    @property
    def layer_record_bytes(self) -> int:
        """Return the bytes of all experts of one layer."""
        return self.num_experts * self.record_bytes

    @property
    def total(self) -> int:
        return sum(self.parts.values()) + sum(self.stacks.values())

    def travelling(self, part: str) -> int:
        """Return the bytes of a part that takes its experts along."""
        return self.records[part] + (self.layer_record_bytes if part_layer(part) in self.stacks else 0)


def weight_units(config: ModelConfig, specs: WeightSpecs, dtype: str, substitutes: WeightSpecs | None = None) -> Units:
    """Return the units of a model. `substitutes`: of its layers, as those that do not stay are drafted with."""
    parts, records, stacks, expert = {}, {}, {}, 0
    for part, listed in specs.items():
        common = [field.nbytes for spec in listed if not is_expert(spec.name) for field in spec.fields(dtype)]
        experts = [field.nbytes for spec in listed if is_expert(spec.name) for field in spec.fields(dtype)]
        parts[part], records[part] = sum(common), sum(map(aligned, common))
        if experts:
            stacks[part_layer(part)] = sum(experts)
            expert = max(expert, sum(aligned(count // config.num_experts) for count in experts))
    return Units(parts, records, stacks, expert, config.num_experts if stacks else 0,
                 config.experts_per_token if stacks else 0, config.tie_embeddings,
                 {part: part_nbytes(listed, dtype) for part, listed in (substitutes or {}).items()})


def part_layer(part: str) -> int:
    """Return the layer of "layers.3"; -1 of another part."""
    return int(part.removeprefix("layers.")) if part.startswith("layers.") else -1
