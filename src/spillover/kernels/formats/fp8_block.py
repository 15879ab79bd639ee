"""FP8 weights with a float32 scale for every block of 128 x 128, or one for a whole matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spillover.kernels.fields import FLOATING, Field, LinearShape
from spillover.kernels.formats.base import Linear, Target, TensorReader
from spillover.kernels.formats.checkpoints.settings import module_of
from spillover.kernels.formats.fp8 import Fp8Format, read_scale
from spillover.kernels.formats.grouped_gemm import GroupedGemm, Tile, invariant_tiles, tiles

BLOCK = 128  # rows and columns that share a scale
LARGEST = 448.0  # largest value of e4m3


@dataclass(frozen=True)
class Fp8Block(Fp8Format):
    """A format: values float8_e4m3fn [N, K] and float32 scales [blocks of N, blocks of K]; each fused matrix begins
    a new block."""

    scale_name: str = "weight_scale_inv"  # name of a module's scales
    per_tensor: bool = False  # whether the checkpoint has one scale per matrix, which is kept for each block
    activations: str = "dynamic"
    blocked = True
    quant_method = "fp8_block"
    # The fastest tiles of those tried on an H200 with the shapes of Qwen3-30B-A3B. If an expert's rows need two tiles,
    # its weights are unpacked twice; a half empty tile costs less. The exponent shift of FP8 does not fit into float16.
    experts = GroupedGemm(
        code=1, few=(Tile(1, 8, 256, 1, 4), Tile(1, 32, 256, 2, 4)), invariant=invariant_tiles(128),
        many=tiles((16, 128, 32, 2, 4, 64, 2), (32, 128, 32, 2, 4, 64, 2), (64, 128, 64, 8, 3, 128, 4),
                   (128, 128, 64, 8, 3, 128, 8)),
        fill=1.0, input_dtypes={torch.float16: torch.bfloat16}, dequantizes=True,
    )

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        scales = sum(map(blocks, shape.output_sizes)), blocks(shape.in_features)
        return (Field("values", "float8_e4m3fn", (shape.out_features, shape.in_features)),
                Field("scales", "float32", scales))

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        """Return the checkpoint's tensors, without the scale of a whole matrix, which has one of two names."""
        values = Field(name, "float8_e4m3fn", (rows, columns))
        scales = Field(f"{module_of(name)}.{self.scale_name}", FLOATING, (blocks(rows), blocks(columns)), squeezed=True)
        return (values,) if self.per_tensor else (values, scales)

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        if not self.per_tensor:
            return super().load(reader, shape, target)
        values, scales = (torch.empty(field.shape, dtype=getattr(torch, field.dtype), device=target.device)
                          for field in self.fields(shape, target.dtype))
        start = start_block = 0
        for name, rows in reader.matrices:
            values[start : start + rows] = reader.read(self.stored(name, rows, shape.in_features)[0])
            scales[start_block : start_block + blocks(rows)] = read_scale(reader, name)
            start, start_block = start + rows, start_block + blocks(rows)
        return values, scales

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        values, scales = w.tensors
        sizes = w.shape.output_sizes
        parts = zip(values.split_with_sizes(sizes), scales.split_with_sizes(tuple(map(blocks, sizes))), strict=True)
        return torch.cat([dequantize(value, scale, dtype) for value, scale in parts])

    def row_scales(self, shape: LinearShape, scales: Tensor) -> Tensor:
        sizes = shape.output_sizes
        return torch.cat([part.repeat_interleave(BLOCK, 0)[:size] for size, part in
                          zip(sizes, scales.split_with_sizes(tuple(map(blocks, sizes))), strict=True)])

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return quantize(weight)

    def host_code(self, dtype: torch.dtype) -> int | None:
        return 3


FP8_BLOCK = Fp8Block()
FP8_TENSOR = Fp8Block(per_tensor=True)


def blocks(size: int) -> int:
    """Return the number of blocks along a dimension; the last may be partly empty."""
    return -(-size // BLOCK)


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise values float8_e4m3fn [..., N, K], scales float32 [..., blocks of N, blocks of K] -> [..., N, K]."""
    rows, columns = values.shape[-2:]
    wide = scales.repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[..., :columns]
    return (values.float() * wide).to(dtype)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise weight [N, K] -> (float8_e4m3fn [N, K], float32 [blocks of N, of K]); the largest becomes 448."""
    rows, columns = weight.shape
    padded = torch.zeros(blocks(rows) * BLOCK, blocks(columns) * BLOCK, device=weight.device)
    padded[:rows, :columns] = weight
    tiles = padded.view(blocks(rows), BLOCK, blocks(columns), BLOCK)
    scales = tiles.abs().amax((1, 3)).clamp(min=1e-12) / LARGEST
    codes = (tiles / scales[:, None, :, None]).view_as(padded)[:rows, :columns]
    return codes.to(torch.float8_e4m3fn).contiguous(), scales
