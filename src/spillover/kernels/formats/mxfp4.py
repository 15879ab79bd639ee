"""OCP MXFP4: 32 four-bit floats (E2M1) share one power-of-two scale (E8M0), the low nibble first."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spillover.kernels.fields import Field, LinearShape
from spillover.kernels.formats.base import Linear, Target, TensorReader, WeightFormat, register
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.formats.grouped_gemm import GroupedGemm, Tile, invariant_tiles, tiles

GROUP = 32  # values per scale
MAX_EXPONENT = 2  # exponent of the largest E2M1 value, 6 = 1.5 * 2**2
SCALE_BIAS = 127  # bias of a scale's exponent
SCALE_PADDING = 4  # rows of scales are padded to a multiple of this, so that a kernel reads whole words
DUMMY_SCALES = (120, 128)  # range of biased exponents, for 2**-7 to 1
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@register
@dataclass(frozen=True)
class Mxfp4(WeightFormat):
    """A format: values uint8 [N, K / 2] and scales uint8 [N, padded(K / GROUP)], whose rows are padded."""

    quant_method = "mxfp4"
    experts_only = True
    loads_stacks = True
    # The fastest tiles of those tried on an H200 with the shapes of gpt-oss-120b. With fewer than four warps, for a few
    # tokens, the compiler uses mma.sync, whose operands unpack with fewer instructions than those of wgmma. Codes
    # unpack to float16 with the fewest; gpt-oss norms the input of the first product and clamps that of the second, so
    # that both fit into float16.
    experts = GroupedGemm(
        code=2, few=(Tile(1, 16, 256, 2, 4), Tile(1, 32, 256, 2, 5)), invariant=invariant_tiles(128),
        many=tiles((16, 128, 32, 2, 4, 64, 2), (32, 128, 32, 2, 4, 64, 2), (64, 128, 64, 4, 3, 128, 8),
                   (128, 128, 64, 4, 3, 128, 8)),
        input_dtypes={torch.bfloat16: torch.float16},
    )

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        rows, columns = shape.out_features, shape.in_features
        return (Field("values", "uint8", (rows, columns // 2)),
                Field("scales", "uint8", (rows, padded(columns // GROUP))))

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        groups = columns // GROUP
        return (Field(f"{name}_blocks", "uint8", (rows, groups, GROUP // 2)),
                Field(f"{name}_scales", "uint8", (rows, groups)))

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        blocks, scales = super().load(reader, shape, target)
        return blocks.flatten(-2), F.pad(scales, (0, padded(scales.shape[-1]) - scales.shape[-1]))

    def dummy_tensor(self, field: Field, device: torch.device, random: torch.Generator) -> Tensor:
        low, high = DUMMY_SCALES if field.name == "scales" else (0, 256)
        return torch.randint(low, high, field.shape, dtype=torch.uint8, device=device, generator=random)

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        values, scales = w.tensors
        return dequantize(values.view(values.shape[0], -1, GROUP // 2), scales, dtype)

    def for_linear(self, name: str) -> WeightFormat:
        return DENSE

    def packed(self, width: int, shape: LinearShape) -> WeightFormat:
        from spillover.kernels.formats.fp4_panels import Fp4Panels

        return Fp4Panels(self) if Fp4Panels.serves(shape) else self

    def host_code(self, dtype: torch.dtype) -> int | None:
        return 4


MXFP4 = Mxfp4()


def padded(groups: int) -> int:
    """Return the number of scales that a row has in memory: those of its `groups`, and padding."""
    return -(-groups // SCALE_PADDING) * SCALE_PADDING


def halved_scales(codes: Tensor) -> Tensor:
    """Return the halves of scales, uint8 -> bfloat16, for values that are stored doubled."""
    exponent = codes.to(torch.int16)
    bits = torch.where(exponent < 2, 32 << exponent, (exponent - 1) << 7)  # exponents 0 and 1 give subnormals
    return bits.to(torch.int16).view(torch.bfloat16)


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise blocks uint8 [..., G, 16], scales uint8 [..., G or padded(G)] -> [..., G * 32]."""
    pairs, powers = _tables(blocks.device)
    values = F.embedding(blocks.int(), pairs).flatten(-2)  # [..., G, 32]
    values *= F.embedding(scales[..., : blocks.shape[-2]].int(), powers)
    return values.to(dtype).flatten(-2)


def byte_values(device: torch.device) -> Tensor:
    """Return the two values of every byte [256, 2]."""
    return _tables(device)[0]


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the two values of every byte [256, 2], and the power of two of every scale [256, 1]."""
    values, codes = torch.tensor(VALUES, device=device), torch.arange(256, device=device)
    pairs = torch.stack((values[codes & 0x0F], values[codes >> 4]), 1)
    return pairs, torch.ldexp(torch.ones(256, 1, device=device), codes[:, None] - SCALE_BIAS)


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise values [..., G * 32] -> (blocks uint8 [..., G, 16], scales uint8 [..., G]), rounding to nearest."""
    grouped = values.float().view(*values.shape[:-1], -1, GROUP)  # [..., G, 32]
    largest = grouped.abs().amax(-1)
    exponents = torch.frexp(largest).exponent - 1 - MAX_EXPONENT  # frexp: largest = m * 2**e with m in [0.5, 1)
    exponents = torch.where(largest > 0, exponents, 0).clamp(-SCALE_BIAS, SCALE_BIAS)
    scaled = torch.ldexp(grouped, -exponents.unsqueeze(-1))
    magnitudes = torch.tensor(VALUES[:8], device=values.device)
    midpoints = (magnitudes[1:] + magnitudes[:-1]) / 2
    codes = torch.bucketize(scaled.abs(), midpoints) + 8 * (scaled < 0)  # [..., G, 32]
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), (exponents + SCALE_BIAS).to(torch.uint8)
