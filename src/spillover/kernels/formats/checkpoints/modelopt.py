"""Checkpoints of NVIDIA's ModelOpt in FP8 and NVFP4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Self

from spillover.kernels.formats.base import WeightFormat, register
from spillover.kernels.formats.checkpoints.settings import Settings
from spillover.kernels.formats.choice import FormatChoice
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.formats.fp8_block import Fp8Block
from spillover.kernels.formats.fp8_rows import Fp8Rows
from spillover.kernels.formats.grouped_gemm import GroupedGemm
from spillover.kernels.formats.nvfp4 import GROUP, Nvfp4

ALGORITHMS: dict[str, WeightFormat] = {  # by quant_algo
    "FP8": Fp8Rows(False, "static"), "FP8_PER_CHANNEL_PER_TOKEN": Fp8Rows(),
    "FP8_PB_WO": Fp8Block("weight_scale", activations="none"),
    "NVFP4": Nvfp4(), "W4A16_NVFP4": Nvfp4(),
}


@register
@dataclass(frozen=True)
class ModelOpt(FormatChoice):
    """A ModelOpt checkpoint: all linears are quantised but excluded ones, given by names with wildcards."""

    weight_format: WeightFormat = ALGORITHMS["FP8"]
    dense: tuple[str, ...] = ()  # excluded modules, which are not quantised
    quant_method = "modelopt"

    @classmethod
    def from_config(cls, quantization: Mapping[str, Any]) -> Self:
        settings = Settings("modelopt", quantization)
        settings = Settings("modelopt", settings.section("quantization") or quantization)
        weight_format = ALGORITHMS[settings.one_of("quant_algo", tuple(ALGORITHMS))]
        if isinstance(weight_format, Nvfp4):
            settings.one_of("group_size", (GROUP,), GROUP)
        return cls(weight_format, settings.names("exclude_modules", "ignore"))

    @property
    def experts(self) -> GroupedGemm | None:
        return self.weight_format.for_experts(()).experts

    def stored_as(self, module: str) -> WeightFormat:
        if module.endswith("embed_tokens"):
            return DENSE
        listed = any(fnmatchcase(module, name) or module.startswith(f"{name}.") for name in self.dense)
        return DENSE if listed else self.weight_format
