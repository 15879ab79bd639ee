"""GPTQ checkpoints: codes of 4 or 8 bits, packed along the input, in groups that may follow an activation order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from spillover.kernels.fields import FLOATING, Field
from spillover.kernels.formats.base import TensorReader, WeightFormat, register
from spillover.kernels.formats.checkpoints.settings import Settings, module_of
from spillover.kernels.formats.choice import FormatChoice
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.formats.grouped_int import GroupedInt, Matrix, unpack_nibbles, words_as_bytes

ONES = {4: 0x11111111, 8: 0x01010101}  # words with 1 in each code, by bits


@dataclass(frozen=True)
class GptqInt(GroupedInt):
    """A matrix as GPTQ stores it: qweight int32 [K * bits / 32, N], qzeros int32 [groups, N * bits / 32], scales
    [groups, N], and g_idx int32 [K] with the group of each input."""

    less_one: bool = True  # whether zeros are stored less one

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        module, groups = module_of(name), self.groups(columns)
        listed = (Field(f"{module}.qweight", "int32", (-(-columns * self.bits // 32), rows)),
                  Field(f"{module}.scales", FLOATING, (groups, rows)),
                  Field(f"{module}.qzeros", "int32", (groups, -(-rows * self.bits // 32))))
        return (*listed, self._g_idx(module, columns)) if self.ordered else listed

    def readable(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        return replace(self, ordered=True).stored(name, rows, columns)

    def read_matrix(self, reader: TensorReader, name: str, rows: int, columns: int) -> Matrix:
        weight, scales, qzeros, *_ = self.stored(name, rows, columns)
        words = words_as_bytes(reader.read(weight)).view(-1, rows, 4)  # bytes of a word hold adjacent inputs
        zeros = self._zeros(reader.read(qzeros), rows)
        if not self.zeros and not bool((zeros == 1 << (self.bits - 1)).all()):
            raise reader.tensor_error(qzeros.name, f"has zeros other than {1 << (self.bits - 1)}, though the "
                                      "configuration says sym true")
        g_idx = self._g_idx(module_of(name), columns)
        group_of = reader.read(g_idx) if self.ordered or reader.has(g_idx.name) else None
        if group_of is not None and not self.ordered and not self.is_in_order(group_of):
            raise reader.tensor_error(g_idx.name,
                                      "has groups in another order, though the configuration says desc_act false")
        return Matrix(
            codes=words.transpose(0, 1).reshape(rows, -1)[:, : columns * self.bits // 8],
            scales=reader.read(scales).T, zeros=zeros, group_of=group_of, scales_name=scales.name,
            order_name=g_idx.name,
        )

    def _g_idx(self, module: str, columns: int) -> Field:
        return Field(f"{module}.g_idx", "int32", (columns,), column_groups=True)

    def _zeros(self, words: Tensor, rows: int) -> Tensor:
        """Return zeros uint8 [N, groups]. Writers subtract the one from whole words, so a zero of 0 borrows."""
        if self.less_one:
            words = words + torch.tensor(ONES[self.bits], dtype=torch.int32)
        codes = words_as_bytes(words)
        return (unpack_nibbles(codes) if self.bits == 4 else codes)[:, :rows].T


@register
@dataclass(frozen=True)
class Gptq(FormatChoice):
    """A GPTQ checkpoint: the linears of layers but routers are quantised, with overrides for single modules."""

    weight_format: GptqInt = GptqInt()
    lm_head: bool = False  # whether lm_head is quantised
    listed: tuple[str, ...] = ()  # suffixes of the modules that are quantised; empty: all
    overrides: tuple[tuple[re.Pattern[str], GptqInt | None], ...] = ()  # the first match applies; None: not quantised
    quant_method = "gptq"

    @classmethod
    def from_config(cls, quantization: Mapping[str, Any]) -> Self:
        settings = Settings("gptq", quantization)
        if settings.get("is_marlin_format"):
            raise settings.unsupported("is_marlin_format", True, "false")
        settings.one_of("pack_dtype", ("int32",), "int32")
        overrides = []
        for key, value in settings.section("dynamic").items():
            sign, pattern = (key[0], key[2:]) if key[:2] in ("-:", "+:") else ("+", key)
            if not isinstance(value, Mapping):
                raise settings.unsupported(f"dynamic {key}", value, "an object")
            weight_format = None if sign == "-" else _weight_format(Settings("gptq", {**quantization, **value}))
            overrides.append((settings.pattern("dynamic", pattern), weight_format))
        blocks = settings.get("modules_in_block_to_quantize") or []
        flat = [name for block in blocks for name in (block if isinstance(block, list) else [block])] if isinstance(
            blocks, list) else blocks
        listed = Settings("gptq", {"modules_in_block_to_quantize": flat}).names("modules_in_block_to_quantize")
        return cls(_weight_format(settings), settings.flag("lm_head", False), listed, tuple(overrides))

    def stored_as(self, module: str) -> WeightFormat:
        if ".layers." not in module and not (module == "lm_head" and self.lm_head):
            return DENSE
        if module.endswith(".gate") or (self.listed and ".layers." in module and not module.endswith(self.listed)):
            return DENSE
        found = next((override for pattern, override in self.overrides if pattern.match(module)), self.weight_format)
        return DENSE if found is None else found


def _weight_format(settings: Settings) -> GptqInt:
    bits = settings.one_of("bits", (4, 8))
    group = settings.group(("group_size",), -1)
    version = settings.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    ordered = settings.flag("desc_act", False) and group > 0
    return GptqInt(bits, group, zeros=not settings.flag("sym", True), ordered=ordered, less_one=version == "gptq")
