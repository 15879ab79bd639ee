"""A tile of a product with one expert's weights, for every format in which weights are stored.

Weights are the left operand: their rows fill the long side of the tensor cores, so that few tokens waste little, and
weights unpacked in registers are used from there. A row of x is multiplied in the same order of k for every tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spillover.kernels.formats import fp8_block, gguf_experts, grouped_gemm, int_experts, mxfp4
from spillover.kernels.formats.dense import Dense
from spillover.kernels.formats.fp8_block import Fp8Block
from spillover.kernels.formats.mxfp4 import Mxfp4

# FORMAT: GroupedGemm.code of the weights' format.
DENSE = tl.constexpr(Dense.experts.code)
FP8 = tl.constexpr(Fp8Block.experts.code)
MXFP4 = tl.constexpr(Mxfp4.experts.code)
CUDA = tl.constexpr(grouped_gemm.CUDA)
INT4 = tl.constexpr(int_experts.FIRST_CODE)  # in groups of 32, then of 64 and of 128
INT8 = tl.constexpr(INT4.value + len(int_experts.GROUPS))
INT_END = tl.constexpr(INT8.value + len(int_experts.GROUPS))
GGUF4 = tl.constexpr(gguf_experts.FIRST_CODE)  # in the order of gguf_experts.KINDS
GGUF_HALVES = tl.constexpr(GGUF4.value + 2)
GGUF_END = tl.constexpr(GGUF4.value + len(gguf_experts.KINDS))

GROUP = tl.constexpr(mxfp4.GROUP)  # values per scale
SCALE_PADDING = tl.constexpr(mxfp4.SCALE_PADDING)
FP8_BLOCK = tl.constexpr(fp8_block.BLOCK)  # rows and columns of FP8 weights that share a scale

# Codes whose bits are moved into a wider type are too small by a power of two: in bfloat16 2**-126 for MXFP4, 2**-120
# for FP8; in float16 2**-14 for MXFP4. Part of the missing factor is multiplied into the activations, which is exact,
# and the rest into the scales.
BFLOAT16_SHIFT = tl.constexpr(64)  # log2 of the activations' part; MXFP4 scales from 2**-61 to 2**65 are exact in tiles
FLOAT16_SHIFT = tl.constexpr(2)  # likewise for float16; MXFP4 scales from 2**-21 to 2**3 are exact
FP8_REST = tl.constexpr(2.0 ** (120 - 64))

# The interpreter supports neither assembly nor bfloat16 arithmetic, and computes the same numbers in float32; the
# device unpacks two values per instruction.
ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)

# Moves the nibbles of a byte to bfloat16's sign, the low bits of its exponent and the top bit of its mantissa.
_SPREAD_TO_BFLOAT16 = tl.constexpr("""{
.reg .b32 low, high, sign, rest;
prmt.b32 low, $4, 0, 0x1404;
prmt.b32 high, $4, 0, 0x3424;
shl.b32 sign, low, 4;
shr.u32 rest, low, 2;
and.b32 rest, rest, 0x01C001C0;
lop3.b32 $0, sign, 0x80008000, rest, 0xEA;
shl.b32 sign, high, 4;
shr.u32 rest, high, 2;
and.b32 rest, rest, 0x01C001C0;
lop3.b32 $1, sign, 0x80008000, rest, 0xEA;
shr.u32 rest, low, 6;
and.b32 rest, rest, 0x01C001C0;
lop3.b32 $2, low, 0x80008000, rest, 0xEA;
shr.u32 rest, high, 6;
and.b32 rest, rest, 0x01C001C0;
lop3.b32 $3, high, 0x80008000, rest, 0xEA;
}""")
# A code sets bits in the upper byte of a float16 only.
_SPREAD_TO_FLOAT16 = tl.constexpr("""{
.reg .b32 even, odd, sign;
shl.b32 sign, $4, 4;
shl.b32 even, $4, 1;
and.b32 even, even, 0x0E0E0E0E;
lop3.b32 even, sign, 0x80808080, even, 0xEA;
shr.u32 odd, $4, 3;
and.b32 odd, odd, 0x0E0E0E0E;
lop3.b32 odd, $4, 0x80808080, odd, 0xEA;
prmt.b32 $0, even, 0, 0x1404;
prmt.b32 $1, even, 0, 0x3424;
prmt.b32 $2, odd, 0, 0x1404;
prmt.b32 $3, odd, 0, 0x3424;
}""")
_SPREAD_FP8 = tl.constexpr("""{
.reg .b32 low, high, rest;
prmt.b32 low, $2, 0, 0x1404;
prmt.b32 high, $2, 0, 0x3424;
shr.u32 rest, low, 4;
and.b32 rest, rest, 0x07F007F0;
lop3.b32 $0, low, 0x80008000, rest, 0xEA;
shr.u32 rest, high, 4;
and.b32 rest, rest, 0x07F007F0;
lop3.b32 $1, high, 0x80008000, rest, 0xEA;
}""")


@triton.jit
def activation_columns(column, width, FORMAT: tl.constexpr):
    """Return the index at which a product's input stores a column: even columns first for codes of 4 bits, as a byte
    holds two weights; for kernels/cuda/mixture.cu in the order of its instructions (`place` there)."""
    if FORMAT == MXFP4 or (FORMAT >= INT4 and FORMAT < INT8) or FORMAT == GGUF4:  # noqa: SIM109
        return (column % 2) * (width // 2) + column // 2
    if FORMAT >= CUDA + INT8 and FORMAT != CUDA + GGUF4:
        return column // 16 * 16 + column // 2 % 2 * 8 + column // 4 % 4 * 2 + column % 2
    if FORMAT >= CUDA + INT4:
        return column // 32 * 32 + column % 4 * 8 + column // 8 % 4 * 2 + column // 4 % 2
    if FORMAT >= CUDA:
        lane = column // 128 * 128 + column // 32 % 4 * 2
        if FORMAT - CUDA == MXFP4:
            return lane + column // 8 % 4 * 32 + column % 2 * 16 + column // 4 % 2 * 8 + column // 2 % 2
        return lane + column // 4 % 8 * 16 + column // 2 % 2 * 8 + column % 2
    return column


@triton.jit
def activation_values(value, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Return float32 activations scaled and rounded as a product's input stores them."""
    if FORMAT == CUDA + FP8 or FORMAT >= CUDA + INT4:
        value *= 0.0625
    elif FORMAT >= CUDA or (FORMAT > DENSE and FORMAT < INT4):
        value *= 4.0 if dtype == tl.float16 else 18446744073709551616.0  # 2**shift
    return value.to(dtype)


@triton.jit
def mxfp4_factor(scale, dtype: tl.constexpr):
    """Return the factors that unpacked codes are multiplied by, from E8M0 scales."""
    if dtype == tl.float16:
        # The exponent field, with a bias of 15, of the scale 2**(s - 127) times 2**14 for the code, less the shift.
        exponent = tl.minimum(tl.maximum(scale.to(tl.int32) - (127 - 14 - 15 + FLOAT16_SHIFT), 0), 30)
        factor = (exponent << 10).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        exponent = tl.minimum(scale.to(tl.int32) + (126 - BFLOAT16_SHIFT), 254)
        factor = (exponent << 7).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return factor


@triton.jit
def spread_mxfp4(codes, dtype: tl.constexpr):
    """Unpack codes uint8 [N, B] -> even and odd ones [N, B] each, as 2**-14 (float16) or 2**-126 of their values."""
    if not ASSEMBLY:
        wide = codes.to(tl.uint32)
        even = (((wide & 0x8) << 28) | ((wide & 0x7) << 22)).to(tl.float32, bitcast=True)
        odd = (((wide & 0x80) << 24) | ((wide & 0x70) << 18)).to(tl.float32, bitcast=True)
        if dtype == tl.float16:
            even *= 5192296858534827628530496329220096.0  # 2**112
            odd *= 5192296858534827628530496329220096.0
    elif dtype == tl.float16:
        even, odd = tl.inline_asm_elementwise(
            _SPREAD_TO_FLOAT16, "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        even, odd = tl.inline_asm_elementwise(
            _SPREAD_TO_BFLOAT16, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    return even, odd


@triton.jit
def spread_fp8(codes):
    """Unpack float8e4nv -> 2**-120 of the values, in bfloat16."""
    if ASSEMBLY:
        wide = tl.inline_asm_elementwise(_SPREAD_FP8, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        wide = codes.to(tl.float32) * 2.0 ** -120
    return wide


@triton.jit
def multiply(w, x, total):
    """Multiply w [N, K], x [M, K] -> total + w @ x.T, with w converted to x's type."""
    if ASSEMBLY:
        total = tl.dot(w.to(x.dtype), tl.trans(x), total, input_precision="ieee")
    else:
        total = tl.dot(w.to(tl.float32), tl.trans(x.to(tl.float32)), total)
    return total


@triton.jit
def product(
    total, x_ptr, x_rows, x_mask, w_ptr, scale_ptr, w_rows, scale_rows, k_end, K: tl.constexpr,
    FORMAT: tl.constexpr, N: tl.constexpr, M: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):
    """Return total + sum over k of w[w_rows, k] * x[x_rows, k], float32 [N, M].

    `w_ptr` and `scale_ptr` point to one expert; `scale_rows` [N] are the rows of its scales. Rows of x outside `x_mask`
    count as zero. `k_end` equals K but is not a constant, so that the compiler does not unroll the loop.
    """
    x_from = x_ptr + x_rows.to(tl.int64)[:, None] * K
    if FORMAT >= INT4 and FORMAT < INT_END:
        # Weights are those of GroupedInt.dequantize, rounded to the type of x. K is a multiple of BLOCK_K.
        index: tl.constexpr = (FORMAT - INT4) % 3
        group: tl.constexpr = 32 if index == 0 else 64 if index == 1 else 128
        share: tl.constexpr = 1 if FORMAT >= INT8 else 2  # codes per byte
        tl.static_assert(K % BLOCK_K == 0 and BLOCK_K % group == 0)
        byte = tl.arange(0, BLOCK_K // share)
        w_from = w_ptr + w_rows[:, None] * (K // share)
        scale_from = scale_ptr + scale_rows[:, None] * (K // group)
        for k in tl.range(0, k_end // share, BLOCK_K // share, num_stages=STAGES):
            at = k + byte
            codes = tl.load(w_from + at[None, :])
            word = tl.load(scale_from + (at // (group // share))[None, :])
            scale = (word & -256).to(tl.float32, bitcast=True)
            zero = word & 255
            if FORMAT >= INT8:
                x = tl.load(x_from + at[None, :], mask=x_mask[:, None], other=0.0)
                total = multiply((codes.to(tl.int32) - zero) * scale, x, total)
            else:
                even = tl.load(x_from + at[None, :], mask=x_mask[:, None], other=0.0)
                odd = tl.load(x_from + K // 2 + at[None, :], mask=x_mask[:, None], other=0.0)
                total = multiply(((codes & 15).to(tl.int32) - zero) * scale, even, total)
                total = multiply(((codes >> 4).to(tl.int32) - zero) * scale, odd, total)
    elif FORMAT >= GGUF4 and FORMAT < GGUF_END:
        # Weights are those of GgufExperts.dequantize, rounded to the type of x. K is a multiple of BLOCK_K.
        halves: tl.constexpr = FORMAT >= GGUF_HALVES
        offsets: tl.constexpr = FORMAT != GGUF_HALVES
        codes_a_byte: tl.constexpr = 2 if FORMAT == GGUF4 else 1
        words: tl.constexpr = 1 + halves + offsets
        tl.static_assert(K % BLOCK_K == 0)
        byte = tl.arange(0, BLOCK_K // codes_a_byte)
        w_from = w_ptr + w_rows[:, None] * (K // codes_a_byte)
        scale_from = scale_ptr + scale_rows[:, None] * (K // 32 * words)
        for k in tl.range(0, k_end // codes_a_byte, BLOCK_K // codes_a_byte, num_stages=STAGES):
            at = k + byte
            codes = tl.load(w_from + at[None, :]).to(tl.int32)
            block = at // (32 // codes_a_byte) * words
            if halves:
                scale = tl.load(scale_from + (block + at // 16 % 2)[None, :])
            else:
                scale = tl.load(scale_from + block[None, :])
            if offsets:
                offset = tl.load(scale_from + (block + words - 1)[None, :])
            else:
                offset = 0.0
            if FORMAT != GGUF4:
                x = tl.load(x_from + at[None, :], mask=x_mask[:, None], other=0.0)
                total = multiply((codes - 128) * scale + offset, x, total)
            else:
                even = tl.load(x_from + at[None, :], mask=x_mask[:, None], other=0.0)
                odd = tl.load(x_from + K // 2 + at[None, :], mask=x_mask[:, None], other=0.0)
                total = multiply((codes & 15) * scale + offset, even, total)
                total = multiply((codes >> 4) * scale + offset, odd, total)
    elif FORMAT == MXFP4:
        half: tl.constexpr = K // 2
        # Rows of scales are padded, so that a tile reads whole words of each.
        groups: tl.constexpr = (K // GROUP + SCALE_PADDING - 1) // SCALE_PADDING * SCALE_PADDING
        byte = tl.arange(0, BLOCK_K // 2)
        group = tl.arange(0, BLOCK_K // GROUP)
        w_from = w_ptr + w_rows[:, None] * half
        scale_from = scale_ptr + scale_rows[:, None] * groups
        for k in tl.range(0, k_end // 2, BLOCK_K // 2, num_stages=STAGES):
            at = k + byte
            at_group = k // (GROUP // 2) + group
            if half % (BLOCK_K // 2) == 0:
                codes = tl.load(w_from + at[None, :])
                scale = tl.load(scale_from + at_group[None, :])
                even = tl.load(x_from + at[None, :], mask=x_mask[:, None], other=0.0)
                odd = tl.load(x_from + half + at[None, :], mask=x_mask[:, None], other=0.0)
            else:
                inside = (at < half)[None, :]
                codes = tl.load(w_from + at[None, :], mask=inside, other=0)
                scale = tl.load(scale_from + at_group[None, :], mask=(at_group < groups)[None, :], other=0)
                even = tl.load(x_from + at[None, :], mask=x_mask[:, None] & inside, other=0.0)
                odd = tl.load(x_from + half + at[None, :], mask=x_mask[:, None] & inside, other=0.0)
            factor = mxfp4_factor(scale, x_ptr.dtype.element_ty)  # [N, groups]
            factor = tl.broadcast_to(factor[:, :, None], (N, BLOCK_K // GROUP, GROUP // 2))
            factor = tl.reshape(factor, (N, BLOCK_K // 2))
            w_even, w_odd = spread_mxfp4(codes, x_ptr.dtype.element_ty)
            total = multiply(w_even * factor, even, total)
            total = multiply(w_odd * factor, odd, total)
    else:
        column = tl.arange(0, BLOCK_K)
        w_from = w_ptr + w_rows[:, None] * K
        for k in tl.range(0, k_end, BLOCK_K, num_stages=STAGES):
            at = k + column
            if K % BLOCK_K == 0:
                w = tl.load(w_from + at[None, :])
                x = tl.load(x_from + at[None, :], mask=x_mask[:, None], other=0.0)
            else:
                inside = (at < K)[None, :]
                w = tl.load(w_from + at[None, :], mask=inside, other=0.0)
                x = tl.load(x_from + at[None, :], mask=x_mask[:, None] & inside, other=0.0)
            if FORMAT == FP8:
                tl.static_assert(FP8_BLOCK % BLOCK_K == 0)
                blocks: tl.constexpr = (K + FP8_BLOCK - 1) // FP8_BLOCK
                scale = tl.load(scale_ptr + scale_rows * blocks + k // FP8_BLOCK)  # [N]
                total += multiply(spread_fp8(w), x, tl.zeros((N, M), tl.float32)) * (scale * FP8_REST)[:, None]
            else:
                total = multiply(w, x, total)
    return total


@triton.jit
def row_product(
    x_ptr, x_row, w_ptr, scale_ptr, w_rows, scale_rows, k_end, K: tl.constexpr, FORMAT: tl.constexpr, N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, ORDERED: tl.constexpr,
):
    """Return the sum over k of w[w_rows, k] * x[x_row, k], float32 [N]; the arguments are those of `product`.

    With ORDERED this is one row of a tile of 16 in `product`, by the same instructions. Otherwise: tensor cores need at
    least eight rows of x, so with scaled weights each of the eight holds a different group of the values of the one row
    that share a scale. The result is then one sum per group, and applying its scale is one multiplication.
    """
    lane = tl.arange(0, 8)
    if ORDERED:
        lane = tl.arange(0, 16)
        total = product(
            tl.zeros((N, 16), tl.float32), x_ptr, tl.where(lane == 0, x_row, 0), lane == 0, w_ptr, scale_ptr, w_rows,
            scale_rows, k_end, K, FORMAT, N, 16, BLOCK_K, STAGES,
        )
        total = tl.where((lane == 0)[None, :], total, 0.0)
    elif FORMAT == MXFP4:
        tl.static_assert(BLOCK_K == 8 * GROUP)
        half: tl.constexpr = K // 2
        groups: tl.constexpr = (K // GROUP + SCALE_PADDING - 1) // SCALE_PADDING * SCALE_PADDING
        byte = tl.arange(0, BLOCK_K // 2)
        lane_mask = (byte // (GROUP // 2))[None, :] == lane[:, None]
        w_from = w_ptr + w_rows[:, None] * half
        scale_from = scale_ptr + scale_rows[:, None] * groups
        x_from = x_ptr + x_row.to(tl.int64) * K + lane[:, None] * 0
        total = tl.zeros((N, 8), tl.float32)
        for k in tl.range(0, k_end // 2, BLOCK_K // 2, num_stages=STAGES):
            at = k + byte
            at_group = k // (GROUP // 2) + lane
            inside = (at < half)[None, :]
            codes = tl.load(w_from + at[None, :], mask=inside, other=0)
            scale = tl.load(scale_from + at_group[None, :], mask=(at_group < groups)[None, :], other=0)
            even = tl.load(x_from + at[None, :], mask=lane_mask & inside, other=0.0)
            odd = tl.load(x_from + half + at[None, :], mask=lane_mask & inside, other=0.0)
            w_even, w_odd = spread_mxfp4(codes, x_ptr.dtype.element_ty)
            part = multiply(w_even, even, tl.zeros((N, 8), tl.float32))
            part = multiply(w_odd, odd, part)
            total += part * (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)  # 2**(scale - 127)
        total *= 4096.0 if x_ptr.dtype.element_ty == tl.float16 else 4611686018427387904.0
    elif FORMAT == FP8:
        blocks: tl.constexpr = (K + FP8_BLOCK - 1) // FP8_BLOCK
        column = tl.arange(0, BLOCK_K)
        lane_mask = (column // FP8_BLOCK)[None, :] == lane[:, None]
        w_from = w_ptr + w_rows[:, None] * K
        scale_from = scale_ptr + scale_rows[:, None] * blocks
        x_from = x_ptr + x_row.to(tl.int64) * K + lane[:, None] * 0
        total = tl.zeros((N, 8), tl.float32)
        for k in tl.range(0, k_end, BLOCK_K, num_stages=STAGES):
            at = k + column
            at_block = k // FP8_BLOCK + lane
            inside = (at < K)[None, :]
            w = tl.load(w_from + at[None, :], mask=inside, other=0.0)
            known = (lane < BLOCK_K // FP8_BLOCK) & (at_block < blocks)
            scale = tl.load(scale_from + at_block[None, :], mask=known[None, :], other=0.0)
            x = tl.load(x_from + at[None, :], mask=lane_mask & inside, other=0.0)
            total += multiply(spread_fp8(w), x, tl.zeros((N, 8), tl.float32)) * scale
        total *= FP8_REST
    else:
        total = tl.zeros((N, 8), tl.float32)
        total = product(
            total, x_ptr, tl.where(lane == 0, x_row, 0), lane == 0, w_ptr, scale_ptr, w_rows, scale_rows, k_end, K,
            FORMAT, N, 8, BLOCK_K, STAGES,
        )
    return tl.sum(total, 1)
