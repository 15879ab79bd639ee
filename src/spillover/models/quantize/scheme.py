"""The schemes that a checkpoint can be quantised to, as compressed-tensors describes and stores them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spillover.errors import SpilloverError
from spillover.kernels.fields import Field
from spillover.kernels.quantize import InputStats, Quantized, gptq_round, round_to_fp8, round_to_int

INT_BITS = {"int4": 4, "int8": 8}
KINDS = ("int4", "int8", "fp8")
GROUPS = (128, 64, 32)  # columns that share a scale; the default is the first that divides all rows
IGNORED = ("lm_head", r"re:.*\.(mlp|block_sparse_moe)\.gate$")  # heads and routers, which are never quantised


@dataclass(frozen=True)
class Scheme:
    kind: str
    group: int  # columns that share a scale; 0: one scale per row
    ignored: tuple[str, ...]  # modules that are not quantised: names, or regular expressions after "re:"
    dtype: str  # type of the scales, and of tensors that are not quantised

    def config(self) -> dict[str, Any]:
        """Return the quantization_config for config.json."""
        weights: dict[str, Any] = {"type": "int", "num_bits": INT_BITS.get(self.kind, 8), "symmetric": True,
                                   "strategy": "group", "group_size": self.group, "dynamic": False, "actorder": None,
                                   "block_structure": None, "observer": "mse", "observer_kwargs": {}}
        inputs: dict[str, Any] | None = None
        if self.kind == "fp8":
            weights |= {"type": "float", "strategy": "channel", "group_size": None}
            inputs = {**weights, "strategy": "token", "dynamic": True, "observer": None}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        return {"quant_method": "compressed-tensors", "quantization_status": "compressed",
                "format": "float-quantized" if self.kind == "fp8" else "pack-quantized",
                "config_groups": {"group_0": group}, "ignore": list(self.ignored), "kv_cache_scheme": None,
                "global_compression_ratio": None}

    def ignores(self, module: str) -> bool:
        """Return whether a module is not quantised."""
        return any(re.match(name.removeprefix("re:"), module) is not None if name.startswith("re:") else name == module
                   for name in self.ignored)

    def round(self, weight: Tensor) -> Quantized:
        """Quantise weight [N, K] by rounding, without calibration."""
        dtype = getattr(torch, self.dtype)
        if self.kind == "fp8":
            return round_to_fp8(weight, dtype)
        return round_to_int(weight, INT_BITS[self.kind], self.group, dtype)

    def gptq_round(self, weight: Tensor, stats: InputStats) -> Quantized:
        """Quantise weight [N, K] such that its outputs on these inputs change little."""
        return gptq_round(weight, stats, INT_BITS[self.kind], self.group, getattr(torch, self.dtype))

    def fields(self, module: str, rows: int, columns: int) -> list[Field]:
        """List the tensors that store a module's weight."""
        if self.kind == "fp8":
            return [Field(f"{module}.weight", "float8_e4m3fn", (rows, columns)),
                    Field(f"{module}.weight_scale", self.dtype, (rows, 1))]
        words = columns * INT_BITS[self.kind] // 32
        return [Field(f"{module}.weight_packed", "int32", (rows, words)),
                Field(f"{module}.weight_scale", self.dtype, (rows, columns // self.group)),
                Field(f"{module}.weight_shape", "int64", (2,))]

    def stored(self, quantized: Quantized) -> list[Tensor]:
        """Return the values of the tensors that `fields` lists."""
        if self.kind == "fp8":
            return [quantized.codes, quantized.scales]
        return [pack_words(quantized.codes, INT_BITS[self.kind]), quantized.scales,
                torch.tensor(quantized.codes.shape, dtype=torch.int64)]


def make_scheme(kind: str, columns: Iterable[tuple[str, int]], group: int | None, ignored: Sequence[str],
                dtype: str) -> Scheme:
    """Make a scheme. `columns`: name and number of columns of each matrix. `group`: None chooses one."""
    for name in ignored:
        try:
            re.compile(name.removeprefix("re:"))
        except re.error as error:
            raise SpilloverError(f"--ignore {name} is not a regular expression ({error})") from error
    scheme = Scheme(kind, 0, (*IGNORED, *ignored), dtype)
    if kind == "fp8":
        if group is not None:
            raise SpilloverError("--group-size is for int4 and int8: fp8 weights have a scale per row")
        return scheme
    taken = [(name, count) for name, count in columns if not scheme.ignores(name.removesuffix(".weight"))]
    fitting = [size for size in GROUPS if all(count % size == 0 for _, count in taken)]
    if group is None and fitting:
        return Scheme(kind, fitting[0], scheme.ignored, dtype)
    if group is not None and (group < 8 or group % 8):
        raise SpilloverError(f"--group-size is a multiple of 8, such as 128, 64 or 32; got {group}")
    name, count = next(((name, count) for name, count in taken if count % (group or GROUPS[-1])), ("", 0))
    if name:
        advice = "--ignore can leave it as it is"
        if fitting:
            advice = f"--group-size {', '.join(map(str, fitting))} would fit"
        raise SpilloverError(f"groups of {group or GROUPS[-1]} do not divide the {count} columns of {name}; {advice}")
    return Scheme(kind, group or GROUPS[0], scheme.ignored, dtype)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes int8 [N, K] -> int32 [N, K * bits / 32] as code + 2**(bits - 1), the first code in the low bits."""
    raised = codes.view(torch.uint8) + (1 << (bits - 1))  # uint8 wraps around
    if bits == 4:
        raised = raised[:, 0::2] | raised[:, 1::2] << 4
    return raised.contiguous().view(torch.int32)  # little-endian words, as on all supported machines
