"""The units that weights move in, with their bytes: as tensors where they are resident, as records where they move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spillover.kernels.fields import aligned
from spillover.models.config import ModelConfig
from spillover.models.weight_specs import WeightSpecs, is_expert, part_nbytes


@dataclass(frozen=True)
class Units:
    parts: Mapping[str, int]  # bytes of each part without its experts, as tensors; in the order of a step
    records: Mapping[str, int]  # bytes of the same as a record
    stacks: Mapping[int, int]  # bytes of a layer's experts, as tensors, by layer; layers without experts are left out
    record_bytes: int  # bytes of the record of one expert; 0: no experts
    num_experts: int
    experts_per_token: int
    tied: bool  # whether the embedding is the head too: a step then uses that part twice
    substitutes: Mapping[str, int] = field(default_factory=dict)  # bytes of each part's rounded copy; {}: none

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(part for part in self.parts if part.startswith("layers."))

    @property
    def expert_layers(self) -> tuple[int, ...]:
        return tuple(self.stacks)

    @property
    def layer_record_bytes(self) -> int:
        """Return the bytes of the records of all experts of one layer."""
        return self.num_experts * self.record_bytes

    @property
    def total(self) -> int:
        return sum(self.parts.values()) + sum(self.stacks.values())

    def moved_bytes(self, part: str) -> int:
        """Return the bytes to move a part together with its experts."""
        return self.records[part] + (self.layer_record_bytes if part_layer(part) in self.stacks else 0)


def weight_units(config: ModelConfig, specs: WeightSpecs, dtype: str, substitutes: WeightSpecs | None = None) -> Units:
    """Return the units of a model. `substitutes`: specs of the rounded copies of its layers."""
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
    """Return the layer number of a part such as "layers.3"; -1 for other parts."""
    return int(part.removeprefix("layers.")) if part.startswith("layers.") else -1
