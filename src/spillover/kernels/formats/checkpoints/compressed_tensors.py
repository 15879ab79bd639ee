"""compressed-tensors checkpoints: groups of linears, each with its scheme and storage format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from spillover.kernels.fields import FLOATING, Field, LinearShape
from spillover.kernels.formats.base import Linear, Target, TensorReader, WeightFormat, register
from spillover.kernels.formats.checkpoints.settings import Settings, module_of
from spillover.kernels.formats.choice import FormatChoice
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.formats.fp8_block import BLOCK, Fp8Block
from spillover.kernels.formats.fp8_rows import Fp8Rows
from spillover.kernels.formats.grouped_gemm import GroupedGemm
from spillover.kernels.formats.grouped_int import GroupedInt, Matrix, unpack_nibbles, words_as_bytes
from spillover.kernels.formats.mxfp4 import GROUP, Mxfp4, dequantize, padded
from spillover.kernels.formats.nvfp4 import Nvfp4

METHOD = "compressed-tensors"
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
           "mxfp4-pack-quantized")


@dataclass(frozen=True)
class PackedInt(GroupedInt):
    """A matrix as pack-quantized stores it: weight_packed int32 [N, K * bits / 32], weight_scale [N, groups],
    weight_zero_point int32 [N * bits / 32, groups], weight_g_idx int32 [K]."""

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        module, groups = module_of(name), self.groups(columns)
        listed = [Field(f"{module}.weight_packed", "int32", (rows, -(-columns * self.bits // 32))),
                  Field(f"{module}.weight_scale", FLOATING, (rows, groups), squeezed=True)]
        if self.zeros:
            listed.append(Field(f"{module}.weight_zero_point", "int32", (-(-rows * self.bits // 32), groups)))
        if self.ordered:
            listed.append(Field(f"{module}.weight_g_idx", "int32", (columns,), column_groups=True))
        return tuple(listed)

    def read_matrix(self, reader: TensorReader, name: str, rows: int, columns: int) -> Matrix:
        packed, scales, *others = self.stored(name, rows, columns)
        codes = words_as_bytes(reader.read(packed))[:, : columns * self.bits // 8]
        zeros = None
        if self.zeros:
            zeros = words_as_bytes(reader.read(others[0]).T)
            zeros = (unpack_nibbles(zeros) if self.bits == 4 else zeros)[:, :rows].T
        return Matrix(codes, reader.read(scales), zeros, reader.read(others[-1]) if self.ordered else None, scales.name,
                      others[-1].name if self.ordered else "")


@dataclass(frozen=True)
class PlainInt(GroupedInt):
    """A matrix as int-quantized stores it: weight int8 [N, K], weight_scale and weight_zero_point [N, groups]."""

    per_tensor: bool = False  # whether the checkpoint has one scale per matrix

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        module, shape = module_of(name), (1,) if self.per_tensor else (rows, self.groups(columns))
        listed = (Field(name, "int8", (rows, columns)), Field(f"{module}.weight_scale", FLOATING, shape, squeezed=True),
                  Field(f"{module}.weight_zero_point", "int8", shape, squeezed=True))
        return listed if self.zeros else listed[:2]

    def read_matrix(self, reader: TensorReader, name: str, rows: int, columns: int) -> Matrix:
        weight, scales, *zeros = self.stored(name, rows, columns)

        def groups(tensor: Tensor) -> Tensor:
            return tensor.expand(rows, 1) if self.per_tensor else tensor

        return Matrix(_unsigned(reader.read(weight)), groups(reader.read(scales)),
                      _unsigned(groups(reader.read(zeros[0]))) if self.zeros else None, scales_name=scales.name)


def _unsigned(numbers: Tensor) -> Tensor:
    """Return int8 numbers as codes counted from 128."""
    return numbers.contiguous().view(torch.uint8) ^ 128


@dataclass(frozen=True)
class PackedMxfp4(Mxfp4):
    """MXFP4 of any linear. Its inputs may exceed the range of float16, so it has no grouped product."""

    experts_only = False
    loads_stacks = False
    experts = None  # type: ignore[assignment]

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        module = module_of(name)
        return (Field(f"{module}.weight_packed", "uint8", (rows, columns // 2)),
                Field(f"{module}.weight_scale", "uint8", (rows, -(-columns // GROUP))))

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        values, scales = WeightFormat.load(self, reader, shape, target)
        return values, F.pad(scales, (0, padded(scales.shape[-1]) - scales.shape[-1]))

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        values, scales = w.tensors
        made = torch.empty(w.shape.out_features, w.shape.in_features, dtype=dtype, device=w.device)
        for _, rows in w.shape.row_chunks():
            made[rows] = dequantize(values[rows].view(len(values[rows]), -1, GROUP // 2), scales[rows], dtype)
        return made


@register
@dataclass(frozen=True)
class CompressedTensors(FormatChoice):
    """A compressed-tensors checkpoint: each linear is in the group whose targets name it most closely."""

    groups: tuple[tuple[str, WeightFormat], ...] = ()  # targets and their formats
    ignored: tuple[str, ...] = ()  # targets that are not quantised
    quant_method = METHOD

    @classmethod
    def from_config(cls, quantization: Mapping[str, Any]) -> Self:
        settings = Settings(METHOD, quantization)
        for key in ("sparsity_config", "transform_config"):
            section = settings.section(key)
            if section and (key == "transform_config" or section.get("format") not in (None, "dense")):
                raise settings.unsupported(key, dict(section), "none")
        groups: list[tuple[str, WeightFormat]] = []
        for name, scheme in settings.section("config_groups").items():
            if not isinstance(scheme, Mapping):
                raise settings.unsupported(f"config_groups {name}", scheme, "an object")
            group = Settings(METHOD, scheme)
            weights = group.section("weights")
            found = _weight_format(weights, group.get("format") or settings.get("format"), settings.get("dtype"),
                                   group.section("input_activations"))
            groups += [(target, found) for target in group.names("targets")]
        if not groups:
            raise settings.unsupported("config_groups", settings.get("config_groups"), "one group or more with targets")
        ignored = settings.names("ignore")
        for target in (*ignored, *(target for target, _ in groups)):
            if target.startswith("re:"):
                settings.pattern("target", target.removeprefix("re:"))
        return cls(tuple(sorted(groups, key=lambda group: ("re:" in group[0], group[0]))), ignored)

    @property
    def experts(self) -> GroupedGemm | None:
        return next((gemm for _, found in self.groups if (gemm := found.for_experts(()).experts) is not None), None)

    def stored_as(self, module: str) -> WeightFormat:
        if module.endswith("embed_tokens") or any(_names(name, module) or name == "Linear" for name in self.ignored):
            return DENSE
        named = [weight_format for target, weight_format in self.groups if _names(target, module)]
        by_class = [weight_format for target, weight_format in self.groups if target == "Linear"]
        return next(iter(named + by_class), DENSE)


def _names(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module


def _weight_format(weights: Mapping[str, Any], stored: object, dtype: object,
                   inputs: Mapping[str, Any]) -> WeightFormat:
    """Return the format of a scheme's weights; DENSE if it has none."""
    if not weights:
        return DENSE
    settings = Settings(METHOD, weights)
    if not isinstance(stored, str) or stored not in FORMATS:
        raise settings.unsupported("format", stored, ", ".join(FORMATS))
    kind = settings.one_of("type", ("int", "float"), "int")
    if stored == "naive-quantized":
        stored = f"{kind}-quantized"
    if stored in ("pack-quantized", "int-quantized"):
        return _int_format(settings, stored == "pack-quantized", dtype)
    settings.one_of("type", ("float",), "int")
    settings.one_of("symmetric", (True,), True)
    if stored == "float-quantized":
        return _fp8_format(settings, inputs)
    settings.one_of("num_bits", (4,), 8)
    if stored == "nvfp4-pack-quantized":
        settings.one_of("group_size", (16,))
        return Nvfp4(divides=True, names=("weight_packed", "weight_scale", "weight_global_scale"))
    settings.one_of("group_size", (GROUP,))
    return PackedMxfp4()


def _int_format(settings: Settings, packed: bool, dtype: object) -> WeightFormat:
    settings.one_of("type", ("int",), "int")
    bits = settings.one_of("num_bits", (4, 8), 8)
    group = settings.group(("group_size",), -1)
    strategies = ("group", "channel") if packed else ("group", "channel", "tensor")
    strategy = settings.one_of("strategy", strategies, "group" if group else "channel")
    if (strategy == "group") != bool(group):
        raise settings.unsupported("group_size", settings.get("group_size"), "a number of columns with strategy group")
    zeros = not settings.flag("symmetric", True)
    order = settings.one_of("actorder", ("group", "dynamic", "weight", "static", True, False), False)
    ordered = order in ("group", "dynamic", True) and bool(group)
    scale_dtype = dtype if group and isinstance(dtype, str) and dtype in ("float16", "bfloat16") else "float32"
    if packed:
        return PackedInt(bits, group, scale_dtype, zeros, ordered)
    if ordered:
        raise settings.unsupported("actorder", order, "weight, with format int-quantized")
    return PlainInt(8, group, scale_dtype, zeros, per_tensor=strategy == "tensor")


def _fp8_format(settings: Settings, inputs: Mapping[str, Any]) -> WeightFormat:
    activations = "none" if not inputs else "dynamic" if inputs.get("dynamic") else "static"
    settings.one_of("num_bits", (8,), 8)
    strategy = settings.one_of("strategy", ("tensor", "channel", "block"), "tensor")
    if strategy != "block":
        return Fp8Rows(strategy == "channel", activations)
    size = settings.get("block_structure")
    if size not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
        raise settings.unsupported("block_structure", size, f"[{BLOCK}, {BLOCK}]")
    return Fp8Block("weight_scale", activations="none" if activations == "static" else activations)
