"""The part of a sharded model that one rank holds: heads, rows of the vocabulary, and experts or a part of each.

Plain arithmetic over shapes. A `Cut` is a rank's part of a checkpoint tensor; `shard_view.py` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spillover.errors import SpilloverError
from spillover.kernels.fields import Field, LinearShape
from spillover.kernels.formats.checkpoints.settings import module_of
from spillover.models.config import ModelConfig
from spillover.models.weight_specs import Source, WeightSpec, WeightSpecs, is_expert

if TYPE_CHECKING:
    from spillover.kernels.formats.base import WeightFormat

Ranges = tuple[tuple[int, int], ...]  # ranges [start, stop), which are concatenated
VOCABULARY_UNIT = 128  # granularity of parts of a large vocabulary in rows: the block size of FP8 weights
_MANY = 1 << 20  # factor, larger than the columns of any group, by which sizes are checked to be linear
# Biases added by rank 0 only, as all ranks' products are summed.
RANK_ZERO_BIASES = ("o_bias", "down_bias", "experts.down_bias")


@dataclass(frozen=True)
class Shard:
    """One of `size` ranks. With `expert_parallel` a rank has whole experts, otherwise a part of each expert."""

    rank: int = 0
    size: int = 1
    expert_parallel: bool = False

    def part(self, count: int) -> tuple[int, int]:
        """Return the rank's [start, stop) of `count` items that are divided evenly."""
        each = count // self.size
        return self.rank * each, (self.rank + 1) * each

    def kv_heads(self, count: int) -> tuple[int, int]:
        """Return the rank's [start, stop) of KV heads; with fewer heads than ranks, several ranks share a head."""
        if count >= self.size:
            return self.part(count)
        head = self.rank * count // self.size
        return head, head + 1

    def vocabulary(self, size: int) -> tuple[int, int]:
        """Return the rank's [start, stop) of the vocabulary; parts can differ in size."""
        return self._bound(size, self.rank), self._bound(size, self.rank + 1)

    def vocabulary_width(self, size: int) -> int:
        """Return the size of the largest part of the vocabulary, which is the first."""
        return self._bound(size, 1)

    def _bound(self, size: int, rank: int) -> int:
        unit = VOCABULARY_UNIT if size >= VOCABULARY_UNIT * self.size else 1
        return size if rank == self.size else -(-size * rank // (self.size * unit)) * unit

    def experts(self, count: int) -> range | None:
        """Return the rank's own experts; None if it has a part of every expert."""
        return range(*self.part(count)) if self.expert_parallel and self.size > 1 else None

    def decoder(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration of the part that the rank computes; routing is over all experts."""
        if self.size == 1:
            return config
        first, last = self.kv_heads(config.num_kv_heads)
        inner = config.expert_intermediate_size
        return replace(
            config, num_heads=config.num_heads // self.size, num_kv_heads=last - first,
            intermediate_size=config.intermediate_size // self.size,
            expert_intermediate_size=inner if self.expert_parallel else inner // self.size)

    def planned(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration of the part that the rank holds, for its plan: only its own experts."""
        local = self.experts(config.num_experts)
        config = self.decoder(config)
        return config if local is None else replace(config, num_experts=len(local),
                                                    experts_per_token=min(config.experts_per_token, len(local)))


@dataclass(frozen=True)
class Cut:
    """A rank's part of one checkpoint tensor."""

    name: str  # name in the checkpoint; an expert may have another name at the rank
    full_shape: tuple[int, ...]  # shape in the checkpoint
    ranges: tuple[Ranges | None, ...]  # ranges in each dimension; None: all of it


Cuts = dict[str, Cut | None]  # by the rank's name of the tensor; None: hidden from the rank


def is_cut(name: str) -> bool:
    """Return whether ranks have different parts of a weight; other weights are replicated."""
    return is_expert(name) or name.removesuffix("_bias") in ("qkv", "o", "sinks", "embedding", "lm_head", "gate_up",
                                                             "down")


def check_shard(config: ModelConfig, size: int, expert_parallel: bool) -> None:
    """Refuse a number of ranks that the model cannot be divided by."""
    if expert_parallel and not config.is_moe:
        raise SpilloverError(f"--enable-expert-parallel deals out experts, and {config.architecture} has none; "
                             "leave it out")
    why = _wrong(config, size, expert_parallel)
    if why is not None:
        possible = [n for n in range(1, config.num_heads + 1) if _wrong(config, n, expert_parallel) is None]
        raise SpilloverError(f"--tensor-parallel-size {size} {why}; it can be {', '.join(map(str, possible))}")


def _wrong(config: ModelConfig, size: int, expert_parallel: bool) -> str | None:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % size:
        return f"does not divide the model's {heads} attention heads"
    if kv_heads % size and size % kv_heads:
        return f"neither divides the model's {kv_heads} key/value heads nor is a multiple of them"
    if _has_dense_layer(config) and config.intermediate_size % size:
        return f"does not divide the MLP's {config.intermediate_size} channels"
    if config.is_moe and expert_parallel and config.num_experts % size:
        return f"does not divide the model's {config.num_experts} experts"
    if config.is_moe and not expert_parallel and config.expert_intermediate_size % size:
        return f"does not divide an expert's {config.expert_intermediate_size} channels"
    return None


def _has_dense_layer(config: ModelConfig) -> bool:
    return not config.is_moe or bool(config.dense_layers)


def shard_specs(specs: WeightSpecs, config: ModelConfig, shard: Shard) -> tuple[WeightSpecs, Cuts]:
    """Return the specs of the rank's weights, and the cuts that they are of a checkpoint of the whole model."""
    if shard.size == 1:
        return specs, {}
    cuts: Cuts = {}
    local = {part: [made for spec in listed if (made := _shard_spec(spec, config, shard, cuts)) is not None]
             for part, listed in specs.items()}
    return local, cuts


@dataclass(frozen=True)
class _SpecCut:
    """A rank's part of a weight: the experts, and the rows and columns of each. None: all."""

    rows: tuple[tuple[Ranges, ...], ...] | None = None  # for each source, for each of its tensors
    columns: tuple[int, int] | None = None
    experts: range | None = None


def _shard_spec(spec: WeightSpec, config: ModelConfig, shard: Shard, cuts: Cuts) -> WeightSpec | None:
    """Return the spec of the rank's part of a weight, and add its cuts to `cuts`; None if it has no part."""
    cut = _spec_cut(spec, config, shard)
    if cut is None:
        return None
    if cut == _SpecCut():
        return spec
    if spec.format is not None:
        spec = replace(spec, format=_format(spec, spec.format, cut))
    sources = []
    for index, source in enumerate(spec.sources):
        rows = cut.rows[index] if cut.rows is not None else tuple(((0, count),) for count in source.rows)
        if spec.format is None and is_expert(spec.name):  # one tensor [experts, rows]; its source's rows are experts
            experts = cut.experts or range(spec.shape[0])
            ranges = None if cut.rows is None else rows[0]
            cuts[source.names[0]] = Cut(source.names[0], spec.shape, (((experts.start, experts.stop),), ranges))
            sources.append(replace(source, rows=(len(experts),)))
            continue
        for name, whole, part in zip(source.names, source.rows, rows, strict=True):
            for local, stored in _names(name, source, spec, cut):
                cuts |= _matrix_cuts(spec, source, local, stored, whole, part, cut, shard)
        sources.append(replace(source, rows=tuple(map(_length, rows))))
    return replace(spec, shape=_shape(spec, cut), sources=tuple(sources))


def _spec_cut(spec: WeightSpec, config: ModelConfig, shard: Shard) -> _SpecCut | None:
    """Return the rank's part of a weight, by its name; None if only rank 0 has it."""
    experts = shard.experts(config.num_experts) if is_expert(spec.name) else None
    if experts is not None:
        return _SpecCut(experts=experts)
    if spec.name in RANK_ZERO_BIASES:
        return _SpecCut() if shard.rank == 0 else None
    name = spec.name.removeprefix("experts.").removesuffix("_bias")
    dim = config.head_dim
    heads, kv_heads = shard.part(config.num_heads), shard.kv_heads(config.num_kv_heads)
    if name == "qkv":
        q, kv = (_scaled(heads, dim),), (_scaled(kv_heads, dim),)
        return _SpecCut(rows=((q, kv, kv),) * len(spec.sources))
    if name == "o":
        return _SpecCut(columns=_scaled(heads, dim))
    if name == "sinks":
        return _SpecCut(rows=(((heads,),),))
    if name in ("embedding", "lm_head"):
        return _SpecCut(rows=(((shard.vocabulary(config.vocab_size),),),) * len(spec.sources))
    inner = config.expert_intermediate_size if is_expert(spec.name) else config.intermediate_size
    if name == "gate_up":
        return _SpecCut(rows=tuple(_gate_up_rows(spec, source, shard.part(inner), inner) for source in spec.sources))
    if name == "down":
        return _SpecCut(columns=shard.part(inner))
    return _SpecCut()


def _gate_up_rows(spec: WeightSpec, source: Source, part: tuple[int, int], inner: int) -> tuple[Ranges, ...]:
    """Return the rows of gate and up: two tensors, or one with gate's rows first, or one with both interleaved."""
    if len(source.names) == 2:
        return (part,), (part,)
    if len(spec.sources[0].names) == 2:
        return ((part, (inner + part[0], inner + part[1])),)
    return (((2 * part[0], 2 * part[1]),),)


def _format(spec: WeightSpec, weight_format: WeightFormat, cut: _SpecCut) -> WeightFormat:
    sizes = spec.linear.output_sizes if cut.rows is None else tuple(map(_length, cut.rows[0]))
    start, stop = cut.columns or (0, spec.shape[-1])
    return weight_format.for_part(LinearShape(sizes, stop - start), cut.columns)


def _names(name: str, source: Source, spec: WeightSpec, cut: _SpecCut) -> Iterator[tuple[str, str]]:
    """Yield (the rank's name, the checkpoint's name) of a matrix, or of each expert's matrix."""
    if not source.per_expert:
        yield name, name
        return
    for local, stored in enumerate(cut.experts or range(spec.experts)):
        yield name.format(expert=local), name.format(expert=stored)


def _matrix_cuts(spec: WeightSpec, source: Source, local: str, stored: str, whole: int, rows: Ranges, cut: _SpecCut,
                 shard: Shard) -> Cuts:
    """Return the cuts of all tensors that the format may read for one matrix."""
    stack: tuple[Ranges | None, ...] = ()
    sizes: tuple[int, ...] = ()
    if spec.experts and not source.per_expert:
        experts = cut.experts or range(spec.experts)
        stack, sizes = (((experts.start, experts.stop),),), (spec.experts,)
    if spec.format is None:
        shape = (whole, *spec.shape[1:])
        return {local: Cut(stored, shape, (rows, *(None for _ in shape[1:])))}
    columns = spec.shape[-1]
    found: Cuts = {}
    fields, names = spec.format.readable(stored, whole, columns), spec.format.readable(local, whole, columns)
    for index, (field, known) in enumerate(zip(fields, names, strict=True)):
        if field.column_groups and cut.columns is not None:
            if spec.format.stored_as(module_of(stored)).ordered:
                raise _refused(shard, stored, "its columns are in activation order (act-order)")
            found[known.name] = None
            continue
        ranges = _field_ranges(spec.format, index, stored, field, (whole, columns), rows, cut.columns, shard)
        shape = (*sizes, *field.shape)
        dims = [*stack, *ranges]
        if source.transposed:
            shape, dims = (*shape[:-2], shape[-1], shape[-2]), [*dims[:-2], dims[-1], dims[-2]]
        found[known.name] = Cut(field.name, shape, tuple(dims))
    return found


def _field_ranges(weight_format: WeightFormat, index: int, name: str, field: Field, size: tuple[int, int], rows: Ranges,
                  columns: tuple[int, int] | None, shard: Shard) -> list[Ranges | None]:
    """Return the ranges of a stored tensor. The shapes that its format stores for matrices of other sizes show how each
    of its dimensions counts rows or columns: by packed words, groups or blocks."""
    def stored(matrix_rows: int, matrix_columns: int) -> Sequence[int]:
        return weight_format.readable(name, matrix_rows, matrix_columns)[index].shape

    def cut(dim: int, bounds: Ranges, of_rows: bool) -> Ranges:
        def place(bound: int, times: int = 1) -> int:
            if bound == 0:
                return 0
            return stored(times * bound, size[1])[dim] if of_rows else stored(size[0], times * bound)[dim]

        for bound in {bound for pair in bounds for bound in pair} - {size[0] if of_rows else size[1]}:
            if place(bound, _MANY) != _MANY * place(bound):
                raise _refused(shard, name, f"a part of it would end within a group of its quantisation "
                                            f"({weight_format.quant_method})")
        return tuple((place(start), place(stop)) for start, stop in bounds)

    ranges: list[Ranges | None] = [None] * len(field.shape)
    part_rows, part_columns = _length(rows), size[1] if columns is None else columns[1] - columns[0]
    for dim, length in enumerate(field.shape):
        if part_rows != size[0] and stored(part_rows, size[1])[dim] != length:
            ranges[dim] = cut(dim, rows, True)
        elif columns is not None and stored(size[0], part_columns)[dim] != length:
            ranges[dim] = cut(dim, (columns,), False)
    return ranges


def _refused(shard: Shard, name: str, why: str) -> SpilloverError:
    return SpilloverError(f"--tensor-parallel-size {shard.size} cannot cut '{name}': {why}; use fewer ranks, or an "
                          "unquantised checkpoint")


def _shape(spec: WeightSpec, cut: _SpecCut) -> tuple[int, ...]:
    shape = list(spec.shape)
    if cut.experts is not None:
        shape[0] = len(cut.experts)
    if cut.rows is not None:
        shape[1 if is_expert(spec.name) else 0] = sum(map(_length, cut.rows[0]))
    if cut.columns is not None:
        shape[-1] = cut.columns[1] - cut.columns[0]
    return tuple(shape)


def _scaled(part: tuple[int, int], factor: int) -> tuple[int, int]:
    return part[0] * factor, part[1] * factor


def _length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)
