"""Weights from a checkpoint, or made up: checked against the specs, converted and packed one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spillover.errors import CheckpointError
from spillover.kernels import fp8
from spillover.kernels.arena import Arena
from spillover.kernels.coded import pack_codes
from spillover.kernels.linear import PackedWeight
from spillover.kernels.linear import pack as pack_linear
from spillover.models.config import ModelConfig
from spillover.models.weight_specs import Source, WeightSpec, WeightSpecs, part_nbytes
from spillover.models.weights import PackedExperts, ResidentWeights

if TYPE_CHECKING:
    from spillover.models.checkpoint import Checkpoint

Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, the weight just loaded
DeviceOf = Callable[[str, WeightSpec], torch.device]  # where a weight of a part is to be loaded

DUMMY_STD = 0.02
DUMMY_SCALES = (120, 128)  # MXFP4 exponents, of 2**-7 to 1
FP8_BELOW_2 = 0xBF  # without the top bit of the exponent e4m3 stays below 2 and is never NaN
FP8_SCALES = "_scale_inv"  # after the name of the weight that they belong to


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    specs: WeightSpecs,
    dtype: torch.dtype,
    device: torch.device,
    pack: bool = True,
    progress: Progress | None = None,
) -> ResidentWeights:
    """Every weight on the device."""
    return ResidentWeights(dict(load_parts(checkpoint, config, specs, dtype, lambda *_: device, pack, progress)))


def load_parts(
    checkpoint: Checkpoint,
    config: ModelConfig,
    specs: WeightSpecs,
    dtype: torch.dtype,
    device: DeviceOf,
    pack: bool = True,
    progress: Progress | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Part after part. Reads every weight once; at any time no more than one checkpoint tensor is held besides what is
    loaded."""
    reader = _Reader(checkpoint, config)
    chosen = {part: [(spec, reader.choose(spec)) for spec in listed] for part, listed in specs.items()}
    total = sum(part_nbytes(listed, dtype.itemsize) for listed in specs.values())
    done = 0
    for part, listed in chosen.items():
        weights: dict[str, Any] = {}
        for spec, source in listed:
            weights[spec.name] = reader.load(spec, source, dtype, device(part, spec), pack)
            done += spec.nbytes(dtype.itemsize)
            if progress is not None:
                progress(done, total, f"{part}.{spec.name}")
        yield part, weights


def dummy_weights(
    config: ModelConfig, specs: WeightSpecs, dtype: torch.dtype, device: torch.device, seed: int = 0, pack: bool = True
) -> ResidentWeights:
    """Random weights of the true shapes, made where they will lie; the same for the same seed."""
    return ResidentWeights(dict(dummy_parts(config, specs, dtype, device, seed, pack)))


def dummy_parts(
    config: ModelConfig, specs: WeightSpecs, dtype: torch.dtype, device: torch.device, seed: int = 0, pack: bool = True
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Part after part, each made on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    arena = Arena()

    def make(spec: WeightSpec) -> Any:
        if not (pack and spec.packable):
            return _dummy(spec, spec.shape, dtype, device, generator)
        if len(spec.shape) == 3:
            return _pack_experts(spec, (_dummy(spec, spec.shape[1:], dtype, device, generator) for _ in _experts(spec)))
        return pack_linear(_dummy(spec, spec.shape, dtype, device, generator), arena)

    for part, listed in specs.items():
        yield part, {spec.name: make(spec) for spec in listed}


def _dummy(
    spec: WeightSpec, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    if spec.dtype == "uint8":
        low, high = DUMMY_SCALES if spec.name.endswith("_scales") else (0, 256)
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=generator)
    if spec.dtype == "float8_e4m3fn":
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
        return codes.bitwise_and_(FP8_BELOW_2).view(torch.float8_e4m3fn)
    if spec.dtype == "float32":
        return torch.empty(shape, device=device).uniform_(0.5 * DUMMY_STD, 1.5 * DUMMY_STD, generator=generator)
    if spec.name.endswith("norm"):
        return torch.ones(shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device=device).normal_(std=DUMMY_STD, generator=generator)


def checkpoint_tensors(checkpoint: Checkpoint, config: ModelConfig, specs: WeightSpecs) -> list[str]:
    """The names of the checkpoint's tensors that make these weights, in their order; checks that all are there."""
    reader = _Reader(checkpoint, config)
    return [name for listed in specs.values() for spec in listed for name, _ in _tensors(spec, reader.choose(spec))]


class PartReader:
    """Reads parts, and single experts, whenever they are asked for: weights whose home is the checkpoint itself."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, specs: WeightSpecs, dtype: torch.dtype,
                 pack: bool) -> None:
        self._reader = _Reader(checkpoint, config)
        self._chosen = {part: [(spec, self._reader.choose(spec)) for spec in listed] for part, listed in specs.items()}
        self._dtype = dtype
        self._pack = pack

    def part(self, part: str, wanted: Callable[[str], bool]) -> dict[str, Any]:
        """Those of a part's weights whose name is wanted, in host memory."""
        cpu = torch.device("cpu")
        return {spec.name: self._reader.load(spec, source, self._dtype, cpu, self._pack)
                for spec, source in self._chosen[part] if wanted(spec.name)}

    def expert(self, part: str, expert: int) -> dict[str, Any]:
        return {spec.name: self._reader.load_expert(spec, source, expert, self._dtype, self._pack)
                for spec, source in self._chosen[part] if spec.name.startswith("experts.")}


class _Reader:
    """Checks what a checkpoint holds against what a spec expects, and names file and tensor where they differ."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.names = checkpoint.names()
        self.arena = Arena()

    def choose(self, spec: WeightSpec) -> Source:
        """The first source whose tensors are all there, with the right shapes."""
        missing: list[str] = []
        for source in spec.sources:
            tensors = list(_tensors(spec, source))
            absent = [name for name, _ in tensors if name not in self.names]
            if absent:
                missing.append(absent[0])
                continue
            for name, expected in tensors:
                found = tuple(self.checkpoint.shape(name))
                if found != expected:
                    shapes = f"shape {list(found)}, expected {list(expected)}"
                    raise CheckpointError(f"{self.checkpoint.file(name)}: tensor '{name}' has {shapes}")
            return source
        names = " or ".join(f"'{name}'" for name in missing)
        raise CheckpointError(f"{self.checkpoint.path} has no tensor {names}, which {self.config.architecture} needs")

    def load(self, spec: WeightSpec, source: Source, dtype: torch.dtype, device: torch.device, pack: bool) -> Any:
        target = dtype if spec.dtype is None else getattr(torch, spec.dtype)
        if source.per_expert or (len(spec.shape) == 3 and spec.packable):
            return self._experts(spec, source, target, device, pack and spec.packable)
        if spec.code_bits:
            return pack_codes([self.checkpoint.read_codes(name) for name in source.names], self.arena)
        weight = self._rows(spec, source, source.names, spec.shape, target, device)
        if spec.padding:
            weight = F.pad(weight, (0, spec.padding))
        return pack_linear(weight, self.arena) if pack and spec.packable else weight

    def load_expert(self, spec: WeightSpec, source: Source, expert: int, dtype: torch.dtype, pack: bool) -> Any:
        """One entry of a stack, as a stack of one."""
        target = dtype if spec.dtype is None else getattr(torch, spec.dtype)
        cpu = torch.device("cpu")
        if source.per_expert:
            names = tuple(name.format(expert=expert) for name in source.names)
            weight = self._rows(spec, source, names, spec.shape[1:], target, cpu)
        else:
            weight = self._read(source.names[0], spec, source, expert).to(target).contiguous()
        if spec.padding:
            weight = F.pad(weight, (0, spec.padding))
        if pack and spec.packable:
            return _pack_experts(replace(spec, shape=(1, *spec.shape[1:])), iter([weight]))
        return weight.unsqueeze(0)

    def _rows(
        self,
        spec: WeightSpec,
        source: Source,
        names: tuple[str, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """The named tensors below each other; a tensor that is read is the reader's own, so one alone needs no copy."""
        if len(names) == 1:
            return self._read(names[0], spec, source).to(device=device, dtype=dtype).contiguous()
        weight = torch.empty(shape, dtype=dtype, device=device)
        for name, rows in zip(names, weight.split_with_sizes(source.rows), strict=True):
            rows.copy_(self._read(name, spec, source))
        return weight

    def _experts(self, spec: WeightSpec, source: Source, dtype: torch.dtype, device: torch.device, pack: bool) -> Any:
        if pack:
            return _pack_experts(spec, self._each_expert(spec, source, dtype, device))
        weight = torch.empty(spec.shape, dtype=dtype, device=device)
        for expert, one in enumerate(self._each_expert(spec, source, dtype, device)):
            weight[expert] = one
        return weight

    def _each_expert(
        self, spec: WeightSpec, source: Source, dtype: torch.dtype, device: torch.device
    ) -> Iterator[Tensor]:
        """[out, in] after [out, in], in the engine's dtype."""
        stack = None if source.per_expert else self._read(source.names[0], spec, source)
        for expert in _experts(spec):
            if stack is not None:
                yield stack[expert].to(device=device, dtype=dtype).contiguous()
                continue
            names = tuple(name.format(expert=expert) for name in source.names)
            yield self._rows(spec, source, names, spec.shape[1:], dtype, device)

    def _read(self, name: str, spec: WeightSpec, source: Source, row: int | None = None) -> Tensor:
        tensor = self.checkpoint.read(name) if row is None else self.checkpoint.read(name, row)
        floating = spec.dtype in (None, "float32")
        expected = "a floating type" if floating else spec.dtype
        matches = tensor.dtype.is_floating_point if floating else tensor.dtype == getattr(torch, spec.dtype or "")
        if spec.dtype is None and tensor.dtype == torch.float8_e4m3fn:
            tensor = self._widen(name, tensor)
        if not matches:
            found = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(f"{self.checkpoint.file(name)}: tensor '{name}' holds {found}, expected {expected}")
        return tensor.transpose(-1, -2) if source.transposed else tensor

    def _widen(self, name: str, values: Tensor) -> Tensor:
        """FP8 values of a weight that is not kept in that form, times their blocks' scales."""
        scales = f"{name}{FP8_SCALES}"
        if scales not in self.names:
            raise CheckpointError(f"{self.checkpoint.path} has no tensor '{scales}' beside its FP8 values")
        if values.dim() != 2:
            raise CheckpointError(f"{self.checkpoint.file(name)}: tensor '{name}' holds FP8 values of shape "
                                  f"{list(values.shape)}, and only matrices are supported in FP8")
        wanted = (fp8.blocks(values.shape[0]), fp8.blocks(values.shape[1]))
        found = self.checkpoint.read(scales)
        if tuple(found.shape) != wanted:
            shapes = f"shape {list(found.shape)}, expected {list(wanted)}"
            raise CheckpointError(f"{self.checkpoint.file(scales)}: tensor '{scales}' has {shapes}")
        return fp8.dequantize(values, found.float(), torch.float32)


def _tensors(spec: WeightSpec, source: Source) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The checkpoint tensors of a source, each with the shape it must have."""
    stored = (*spec.shape[:-1], spec.shape[-1] - spec.padding)
    shape = stored[1:] if source.per_expert else stored
    for expert in _experts(spec) if source.per_expert else range(1):
        for name, rows in zip(source.names, source.rows, strict=True):
            one = shape if len(source.names) == 1 else (rows, *shape[1:])
            yield name.format(expert=expert), (*one[:-2], one[-1], one[-2]) if source.transposed else one


def _experts(spec: WeightSpec) -> range:
    return range(spec.shape[0])


def _pack_experts(spec: WeightSpec, experts: Iterator[Tensor]) -> Tensor | PackedExperts:
    """The stack, filled expert by expert so that no second copy of it is ever held."""
    stack: Tensor | None = None
    packed = False
    for index, expert in enumerate(experts):
        weight = pack_linear(expert)
        packed = isinstance(weight, PackedWeight)
        data = weight.panels if isinstance(weight, PackedWeight) else weight
        if stack is None:
            stack = torch.empty((spec.shape[0], *data.shape), dtype=data.dtype, device=data.device)
        stack[index] = data
    assert stack is not None
    return PackedExperts(stack, spec.shape[1]) if packed else stack
