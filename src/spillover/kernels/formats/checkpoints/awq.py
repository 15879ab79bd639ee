"""AWQ checkpoints (version gemm): codes of 4 bits, packed along the output, zeros and scales per group of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from spillover.kernels.fields import FLOATING, Field
from spillover.kernels.formats.base import TensorReader, WeightFormat, register
from spillover.kernels.formats.checkpoints.settings import Settings, is_listed, module_of
from spillover.kernels.formats.choice import FormatChoice
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.formats.grouped_int import GroupedInt, Matrix, unpack_nibbles, words_as_bytes

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # place of each column's code in a word of eight codes


@dataclass(frozen=True)
class AwqInt(GroupedInt):
    """A matrix as AWQ stores it: qweight int32 [K, N / 8], qzeros int32 [groups, N / 8], scales [groups, N]."""

    zeros: bool = True
    has_zeros: bool = True  # whether the configuration says so; a file may have zeros in any case

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        module, groups = module_of(name), self.groups(columns)
        listed = (Field(f"{module}.qweight", "int32", (columns, -(-rows // 8))),
                  Field(f"{module}.scales", FLOATING, (groups, rows)),
                  Field(f"{module}.qzeros", "int32", (groups, -(-rows // 8))))
        return listed if self.has_zeros else listed[:2]

    def readable(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        return replace(self, has_zeros=True).stored(name, rows, columns)

    def read_matrix(self, reader: TensorReader, name: str, rows: int, columns: int) -> Matrix:
        weight, scales, zeros = AwqInt(group=self.group).stored(name, rows, columns)
        with_zeros = self.has_zeros or reader.has(zeros.name)
        return Matrix(
            codes=self.pack(_unpacked(reader.read(weight), rows).T),
            scales=reader.read(scales).T,
            zeros=_unpacked(reader.read(zeros), rows).T if with_zeros else None,
            scales_name=scales.name,
        )


def _unpacked(words: Tensor, columns: int) -> Tensor:
    """Unpack int32 [n, columns / 8] -> uint8 [n, columns]."""
    codes = unpack_nibbles(words_as_bytes(words)).view(len(words), -1, 8)
    return codes[..., list(PLACES)].flatten(1)[:, :columns]


@register
@dataclass(frozen=True)
class Awq(FormatChoice):
    """An AWQ checkpoint: all linears of layers are quantised but routers and listed modules."""

    weight_format: AwqInt = AwqInt()
    dense: tuple[str, ...] = ()  # listed modules, which are not quantised
    quant_method = "awq"

    @classmethod
    def from_config(cls, quantization: Mapping[str, Any]) -> Self:
        settings = Settings("awq", quantization)
        version = settings.get("version")
        if str(version or "gemm").lower() != "gemm":
            raise settings.unsupported("version", version, "gemm")
        settings.one_of(("bits", "w_bit"), (4,), 4)
        group = settings.group(("group_size", "q_group_size"), 128)
        return cls(AwqInt(group=group, has_zeros=settings.flag("zero_point", True)),
                   settings.names("modules_to_not_convert"))

    def stored_as(self, module: str) -> WeightFormat:
        dense = ".layers." not in module or module.endswith(".gate") or is_listed(module, self.dense)
        return DENSE if dense else self.weight_format
