"""FP8 checkpoints of Hugging Face and DeepSeek: e4m3 with a scale for each block of 128 x 128, or for each matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from spillover.kernels.formats.base import WeightFormat, register
from spillover.kernels.formats.checkpoints.settings import Settings, is_listed
from spillover.kernels.formats.choice import FormatChoice
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.formats.fp8_block import BLOCK, FP8_BLOCK
from spillover.kernels.formats.fp8_rows import Fp8Rows
from spillover.kernels.formats.grouped_gemm import GroupedGemm


@register
@dataclass(frozen=True)
class Fp8(FormatChoice):
    """An FP8 checkpoint: all linears are quantised but listed ones, and those stored in a wider type."""

    weight_format: WeightFormat = FP8_BLOCK
    dense: tuple[str, ...] = ()  # listed modules, which are not quantised
    quant_method = "fp8"

    @classmethod
    def from_config(cls, quantization: Mapping[str, Any]) -> Self:
        settings = Settings("fp8", quantization)
        settings.one_of("fmt", ("e4m3",), "e4m3")
        scheme = settings.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
        size = settings.get("weight_block_size")
        if size is not None and size != [BLOCK, BLOCK]:
            raise settings.unsupported("weight_block_size", size, f"[{BLOCK}, {BLOCK}] or none")
        return cls(Fp8Rows(False, scheme) if size is None else FP8_BLOCK,
                   settings.names("modules_to_not_convert", "ignored_layers"))

    @property
    def experts(self) -> GroupedGemm | None:
        return self.weight_format.for_experts(()).experts

    def stored_as(self, module: str) -> WeightFormat:
        return DENSE if is_listed(module, self.dense) else self.weight_format
