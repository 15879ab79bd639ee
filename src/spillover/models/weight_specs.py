"""The weights of a model, and their tensors in a checkpoint. Plain arithmetic, which the planner uses too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spillover.kernels.fields import Field, LinearShape

if TYPE_CHECKING:
    from spillover.kernels.formats.base import Target, WeightFormat
    from spillover.kernels.formats.gguf_codes import CodeForm


@dataclass(frozen=True)
class Source:
    """Checkpoint tensors that are concatenated along their rows to make one weight (or one expert of it).

    The names of a linear are those of its unquantised tensors; its format derives the names of the stored ones.
    """

    names: tuple[str, ...]  # tensor names; with "{expert}" in them: one tensor per expert, to be stacked
    rows: tuple[int, ...]  # rows of each tensor
    transposed: bool = False  # whether the last two dimensions are swapped in the file

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.names[0]


@dataclass(frozen=True)
class WeightSpec:
    name: str
    shape: tuple[int, ...]  # [out, in] for a linear, [experts, out, in] for a stack of them
    sources: tuple[Source, ...]  # alternatives, of which the first whose tensors exist is used
    format: WeightFormat | None = None  # format of a linear; None: not a linear, but a tensor in the compute type

    @property
    def experts(self) -> int:
        """Return the number of linears in a stack; 0 if it is a single linear or a tensor."""
        return self.shape[0] if self.format is not None and len(self.shape) == 3 else 0

    @property
    def linear(self) -> LinearShape:
        return LinearShape(self.sources[0].rows, self.shape[-1])

    @property
    def params(self) -> int:
        """Return the number of parameters of linears, two FLOPs each for every token; 0 for a tensor."""
        return math.prod(self.shape) if self.format is not None else 0

    def fields(self, dtype: str) -> list[Field]:
        """List its tensors as loaded for compute type `dtype`; those of a stack hold all experts."""
        if self.format is None:
            return [Field(self.name, dtype, self.shape)]
        stack = (self.experts,) if self.experts else ()
        return [replace(field, shape=(*stack, *field.shape)) for field in self.format.fields(self.linear, dtype)]

    def nbytes(self, dtype: str) -> int:
        return sum(field.nbytes for field in self.fields(dtype))


WeightSpecs = dict[str, list[WeightSpec]]  # specs of the weights of each part


def layer_part(layer: int) -> str:
    return f"layers.{layer}"


def is_expert(name: str) -> bool:
    """Return whether a weight of this name has one entry per expert."""
    return name.startswith("experts.")


def part_nbytes(specs: Iterable[WeightSpec], dtype: str) -> int:
    return sum(spec.nbytes(dtype) for spec in specs)


def stored_in(specs: WeightSpecs, stored: Callable[[str], WeightFormat],
              mixed: WeightFormat | None = None) -> WeightSpecs:
    """Return the specs with the formats of a checkpoint: `stored` gives the format of each tensor by its name. A linear
    whose tensors have several formats gets `mixed`, or is unchanged without it."""
    from spillover.kernels.formats.dense import DENSE

    def taken(spec: WeightSpec) -> WeightSpec:
        if spec.format != DENSE or spec.experts or len(spec.sources) != 1 or spec.sources[0].transposed:
            return spec
        found = {stored(name) for name in spec.sources[0].names}
        return replace(spec, format=found.pop() if len(found) == 1 else mixed or spec.format)

    return {part: [taken(spec) for spec in listed] for part, listed in specs.items()}


def in_codes(specs: WeightSpecs, codes: Mapping[str, str], device: str = "cpu") -> WeightSpecs:
    """Return the specs with linears and experts kept in a GGUF file's codes, if all their matrices are in codes that
    the device can multiply with. `codes`: the GGUF types of tensors in codes, by name."""
    from spillover.kernels.formats.dense import DENSE, EMBEDDING
    from spillover.kernels.formats.gguf_codes import CODE_FORMS, GgufCodes

    def forms_of(spec: WeightSpec) -> tuple[CodeForm, ...]:
        """List the forms of the matrices; empty if not all are in codes, or if the experts' forms differ."""
        source = spec.sources[0]
        if (spec.format not in (DENSE, EMBEDDING) or source.transposed
                or source.per_expert != bool(spec.experts)):
            return ()
        experts = range(spec.experts or 1)
        types = [{codes.get(name.format(expert=expert)) for expert in experts} for name in source.names]
        forms = [CODE_FORMS[kinds.pop() or ""] for kinds in types if len(kinds) == 1 and None not in kinds]
        return tuple(forms) if len(forms) == len(types) else ()

    def kept(spec: WeightSpec, stacks: WeightFormat | None) -> WeightFormat | None:
        if not (forms := forms_of(spec)):
            return spec.format
        if device == "cpu":
            return GgufCodes(forms)
        from spillover.kernels.formats.coded_cuda import GgufCuda

        if spec.experts:
            return stacks or spec.format
        return GgufCuda(forms) if GgufCuda.serves(forms, spec.linear) else spec.format

    def stacks_of(listed: list[WeightSpec]) -> WeightFormat | None:
        """Choose one format for all experts of a layer, as both products of a mixture must have the same."""
        from spillover.kernels.formats.gguf_experts import experts_format

        stacks = [spec for spec in listed if spec.experts]
        forms = [forms_of(spec) for spec in stacks]
        if device == "cpu" or not stacks or not all(forms):
            return None
        return experts_format({form for some in forms for form in some}, [spec.linear for spec in stacks])

    def taken(listed: list[WeightSpec]) -> list[WeightSpec]:
        stacks = stacks_of(listed)
        formats = [kept(spec, stacks) for spec in listed]
        return [spec if weight_format == spec.format else replace(spec, sources=spec.sources[:1], format=weight_format)
                for spec, weight_format in zip(listed, formats, strict=True)]

    return {part: taken(listed) for part, listed in specs.items()}


def kept_on(specs: WeightSpecs, device: str, dtype: str, batch_invariant: bool = False) -> WeightSpecs:
    """Return the specs in the formats that a device computes with."""
    from spillover.kernels import native

    if device == "cuda":
        specs = _on_cuda(specs)
        return reformatted(specs, lambda weight: weight.batch_invariant()) if batch_invariant else specs
    width = native.panel_width() if dtype == "float32" and native.library() is not None else 0
    if not width:
        return specs
    return {part: [spec if spec.format is None else replace(spec, format=spec.format.packed(width, spec.linear))
                   for spec in listed] for part, listed in specs.items()}


def _on_cuda(specs: WeightSpecs) -> WeightSpecs:
    """Return the specs in formats that a CUDA device multiplies with; experts are dequantised when loaded if they have
    none, or not the same one for both products."""
    from spillover.kernels.formats.choice import Dequantized

    def taken(spec: WeightSpec, in_codes: bool) -> WeightSpec:
        if spec.format is None:
            return spec
        if not spec.experts:
            return replace(spec, format=spec.format.on_cuda(spec.linear))
        found = spec.format.experts_on_cuda(spec.linear) if in_codes else None
        return replace(spec, format=found or Dequantized(spec.format))

    def converted(listed: list[WeightSpec]) -> list[WeightSpec]:
        found = [spec.format.experts_on_cuda(spec.linear) for spec in listed if spec.format and spec.experts]
        products = {None if made is None or made.experts is None else made.experts.code for made in found}
        return [taken(spec, len(products) == 1) for spec in listed]

    return {part: converted(listed) for part, listed in specs.items()}


def dequantized_experts(specs: WeightSpecs) -> WeightFormat | None:
    """Return the stored format of experts that are dequantised when loaded; None if there are none."""
    formats = (spec.format for listed in specs.values() for spec in listed if spec.format and spec.experts)
    return next((stored.dequantized_from for stored in formats if stored.dequantized_from), None)


def reformatted(specs: WeightSpecs, change: Callable[[WeightFormat], WeightFormat]) -> WeightSpecs:
    return {part: [spec if spec.format is None else replace(spec, format=change(spec.format)) for spec in listed]
            for part, listed in specs.items()}


def prepare_products(specs: WeightSpecs, target: Target, most_rows: int) -> None:
    """Compile the kernels for products of up to `most_rows` rows with all linears in advance."""
    linears: dict[WeightFormat, dict[tuple[LinearShape, bool], None]] = {}
    for listed in specs.values():
        biases = {spec.name for spec in listed if spec.format is None}
        for spec in listed:
            if spec.format is not None and not spec.experts:
                linears.setdefault(spec.format, {})[spec.linear, f"{spec.name}_bias" in biases] = None
    for weight_format, shapes in linears.items():
        weight_format.prepare(list(shapes), target, most_rows)
