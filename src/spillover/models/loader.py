"""Loading of weights from a checkpoint, and dummy weights: checked, converted and packed one tensor at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spillover.errors import CheckpointError
from spillover.kernels.arena import Arena
from spillover.kernels.fields import FLOATING, Field
from spillover.kernels.formats.base import DUMMY_STD, Linear, Target, Weight
from spillover.models.config import ModelConfig
from spillover.models.sharding.shard import is_cut
from spillover.models.weight_specs import Source, WeightSpec, WeightSpecs, is_expert, part_nbytes

if TYPE_CHECKING:
    from spillover.kernels.formats.gguf_codes import Codes
    from spillover.models.checkpoint import Checkpoint

Progress = Callable[[int, int, str], None]  # (bytes loaded, total bytes, name of the weight just loaded)
DeviceOf = Callable[[str, WeightSpec], torch.device]  # returns the device to load a weight of a part to


def load_parts(
    checkpoint: Checkpoint,
    config: ModelConfig,
    specs: WeightSpecs,
    dtype: torch.dtype,
    device: DeviceOf,
    progress: Progress | None = None,
) -> Iterator[tuple[str, dict[str, Weight]]]:
    """Yield each part with its weights; at most one checkpoint tensor is in memory in addition to the loaded ones."""
    reader = _Reader(checkpoint, config)
    chosen = {part: [(spec, reader.choose(spec)) for spec in listed] for part, listed in specs.items()}
    total = sum(part_nbytes(listed, _named(dtype)) for listed in specs.values())
    arena, done = Arena(), 0
    for part, listed in chosen.items():
        weights: dict[str, Weight] = {}
        for spec, source in listed:
            weights[spec.name] = reader.load(spec, source, Target(_named(dtype), device(part, spec), arena))
            done += spec.nbytes(_named(dtype))
            if progress is not None:
                progress(done, total, f"{part}.{spec.name}")
        yield part, weights


def dummy_parts(specs: WeightSpecs, dtype: torch.dtype, device: torch.device, seed: int = 0,
                rank: int | None = None) -> Iterator[tuple[str, dict[str, Weight]]]:
    """Yield each part with random weights of the true shapes, made on `device`; equal for equal seeds.

    `rank`: one of several ranks, whose weights differ where they are sharded and are equal otherwise; None: one rank.
    """
    random, target = torch.Generator(device).manual_seed(seed), Target(_named(dtype), device, Arena())

    def make(part: str, spec: WeightSpec) -> Weight:
        if rank is not None:  # ranks may make weights in different orders
            what = repr((seed, part, spec.name, rank if is_cut(spec.name) else -1))
            random.manual_seed(int.from_bytes(hashlib.blake2b(what.encode(), digest_size=7).digest()))
        if spec.format is not None:
            return Linear(spec.format, spec.linear, spec.format.dummy(spec.linear, spec.experts, target, random))
        made = torch.empty(spec.shape, dtype=dtype, device=device)
        return made.fill_(1) if spec.name.endswith("norm") else made.normal_(std=DUMMY_STD, generator=random)

    for part, listed in specs.items():
        yield part, {spec.name: make(part, spec) for spec in listed}


def checkpoint_tensors(checkpoint: Checkpoint, config: ModelConfig, specs: WeightSpecs) -> list[str]:
    """Return the names of the checkpoint's tensors for these weights, in order; raises if one is missing."""
    reader = _Reader(checkpoint, config)
    return [tensor.name for listed in specs.values() for spec in listed
            for tensor in _tensors(spec, reader.choose(spec))]


class PartReader:
    """A reader of parts and single experts on demand, for weights whose home is the checkpoint on disk."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, specs: WeightSpecs, dtype: torch.dtype) -> None:
        self._reader = _Reader(checkpoint, config)
        self._chosen = {part: [(spec, self._reader.choose(spec)) for spec in listed] for part, listed in specs.items()}
        self._target = Target(_named(dtype), torch.device("cpu"))

    def part(self, part: str, wanted: Callable[[str], bool]) -> dict[str, Weight]:
        """Read the weights of a part whose names are `wanted` into host memory."""
        return {spec.name: self._reader.load(spec, source, self._target) for spec, source in self._chosen[part]
                if wanted(spec.name)}

    def expert(self, part: str, expert: int) -> dict[str, Weight]:
        """Read one expert of a part, as stacks of one."""
        return {spec.name: self._reader.load_expert(spec, source, expert, self._target)
                for spec, source in self._chosen[part] if is_expert(spec.name)}


class _Reader:
    """A reader that checks a checkpoint's tensors against the specs; errors name file and tensor."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.names = checkpoint.names()

    def choose(self, spec: WeightSpec) -> Source:
        """Return the first source whose tensors all exist; raises if their shapes are wrong."""
        missing: list[str] = []
        for source in spec.sources:
            tensors = list(_tensors(spec, source))
            absent = [tensor.name for tensor in tensors if tensor.name not in self.names]
            if absent:
                missing.append(absent[0])
                continue
            for tensor in tensors:
                self._check_shape(tensor)
            return source
        raise self._missing(missing)

    def load(self, spec: WeightSpec, source: Source, target: Target) -> Weight:
        if spec.format is None:
            return self._tensor(spec, source, target)
        if not spec.experts or (spec.format.loads_stacks and not source.per_expert):
            tensors = _Tensors(self, spec, source)
            return Linear(spec.format, spec.linear, spec.format.load(tensors, spec.linear, target))
        stacks = tuple(torch.empty(field.shape, dtype=getattr(torch, field.dtype), device=target.device)
                       for field in spec.fields(target.dtype))
        whole: dict[str, Tensor] = {}
        for expert in range(spec.experts):
            tensors = _Tensors(self, spec, source, expert, whole)
            one = spec.format.load(tensors, spec.linear, replace(target, arena=None))
            for stack, tensor in zip(stacks, one, strict=True):
                stack[expert] = tensor
        return Linear(spec.format, spec.linear, stacks)

    def load_expert(self, spec: WeightSpec, source: Source, expert: int, target: Target) -> Weight:
        """Read one expert of a stack, as a stack of one."""
        if spec.format is None:
            entry = self.read(Field(source.names[0], FLOATING, spec.shape), row=expert)
            return entry.to(getattr(torch, target.dtype)).contiguous().unsqueeze(0)
        made = spec.format.load(_Tensors(self, spec, source, expert), spec.linear, target)
        return Linear(spec.format, spec.linear, tuple(tensor.unsqueeze(0) for tensor in made))

    def read(self, tensor: Field, transposed: bool = False, row: int | None = None) -> Tensor:
        """Read a tensor. `row`: read only this index of its first dimension."""
        if tensor.name not in self.names:
            raise self._missing([tensor.name])
        self._check_shape(tensor)
        found = self.checkpoint.read(tensor.name) if row is None else self.checkpoint.read(tensor.name, row)
        if tensor.squeezed and row is None:
            found = found.reshape(tensor.shape)
        floating = tensor.dtype == FLOATING
        if not (found.dtype.is_floating_point and found.itemsize > 1 if floating
                else found.dtype == getattr(torch, tensor.dtype)):
            expected = "a floating type" if floating else tensor.dtype
            raise CheckpointError(f"{self.checkpoint.file(tensor.name)}: tensor '{tensor.name}' holds "
                                  f"{_named(found.dtype)}, expected {expected}")
        return found.transpose(-1, -2) if transposed else found

    def _tensor(self, spec: WeightSpec, source: Source, target: Target) -> Tensor:
        tensors, dtype = list(_tensors(spec, source)), getattr(torch, target.dtype)
        if len(tensors) == 1:
            return self.read(tensors[0]).to(device=target.device, dtype=dtype).contiguous()
        whole = torch.empty(spec.shape, dtype=dtype, device=target.device)
        for tensor, rows in zip(tensors, whole.split_with_sizes(source.rows), strict=True):
            rows.copy_(self.read(tensor))
        return whole

    def _check_shape(self, tensor: Field) -> None:
        found = tuple(self.checkpoint.shape(tensor.name))
        expected = tensor.shape
        if _unit_free(found) != _unit_free(expected) if tensor.squeezed else found != expected:
            shapes = f"shape {list(found)}, expected {list(tensor.shape)}"
            raise CheckpointError(f"{self.checkpoint.file(tensor.name)}: tensor '{tensor.name}' has {shapes}")

    def _missing(self, names: list[str]) -> CheckpointError:
        listed = " or ".join(f"'{name}'" for name in names)
        return CheckpointError(f"{self.checkpoint.path} has no tensor {listed}, which {self.config.architecture} needs")


class _Tensors:
    """A TensorReader for the tensors of one linear, for use by its format."""

    def __init__(self, reader: _Reader, spec: WeightSpec, source: Source, expert: int | None = None,
                 whole: dict[str, Tensor] | None = None) -> None:
        """Make a reader for a source. `expert`: the expert of a stack to read; None: all. `whole`: a cache of tensors
        that hold all experts; None: only one expert's part of such tensors is read."""
        self.matrices: Sequence[tuple[str, int]] = _matrices(source, expert or 0)
        self._reader = reader
        self._stack = 0 if source.per_expert else spec.experts
        self._transposed = source.transposed
        self._expert = expert if self._stack else None
        self._whole = whole

    def has(self, name: str) -> bool:
        return name in self._reader.names

    def dtype(self, name: str) -> torch.dtype:
        return self._reader.checkpoint.dtype(name)

    def tensor_error(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self._reader.checkpoint.file(name)}: tensor '{name}' {what}")

    def read(self, tensor: Field) -> Tensor:
        stored = _stored(tensor, self._stack, self._transposed)
        if self._expert is None or self._whole is None:
            return self._reader.read(stored, self._transposed, self._expert)
        if tensor.name not in self._whole:
            self._whole[tensor.name] = self._reader.read(stored, self._transposed)
        return self._whole[tensor.name][self._expert]

    def read_codes(self, name: str) -> Codes:
        return self._reader.checkpoint.read_codes(name)


def _tensors(spec: WeightSpec, source: Source) -> Iterator[Field]:
    """Yield the checkpoint tensors of a source."""
    stack = 0 if source.per_expert else spec.experts
    for expert in range(spec.experts) if source.per_expert else range(1):
        for name, rows in _matrices(source, expert):
            if spec.format is None:
                yield Field(name, FLOATING, spec.shape if len(source.names) == 1 else (rows, *spec.shape[1:]))
                continue
            for tensor in spec.format.stored(name, rows, spec.shape[-1]):
                yield _stored(tensor, stack, source.transposed)


def _stored(tensor: Field, stack: int, transposed: bool) -> Field:
    """Return a field with its shape in the checkpoint."""
    shape = (stack, *tensor.shape) if stack else tensor.shape
    return replace(tensor, shape=(*shape[:-2], shape[-1], shape[-2]) if transposed else shape)


def _matrices(source: Source, expert: int) -> list[tuple[str, int]]:
    return [(name.format(expert=expert), rows) for name, rows in zip(source.names, source.rows, strict=True)]


def _unit_free(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
