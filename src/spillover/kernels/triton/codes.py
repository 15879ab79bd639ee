"""KV in eight bits: value = code * scale, one float32 scale per token and head, as `kernels.kv_quant` writes it."""

from __future__ import annotations

import triton
import triton.language as tl

CODES = {"auto": 0, "fp8": 1, "int8": 2}  # numbers by which the kernels distinguish the types

_ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter does not support assembly
# Four codes of a register become float16, two per register. int8: a code plus 128 is the low byte of a float16 >= 1024.
_SPREAD_FP8 = tl.constexpr("""{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")
_SPREAD_INT8 = tl.constexpr("""{
.reg .b32 number, base, low, high;
xor.b32 number, $2, 0x80808080;
mov.b32 base, 0x64646464;
prmt.b32 low, number, base, 0x4140;
prmt.b32 high, number, base, 0x4342;
mov.b32 base, 0x64806480;
sub.f16x2 $0, low, base;
sub.f16x2 $1, high, base;
}""")

# Adding and subtracting 1.5 * 2**23 rounds a float32 of the size of a code to an integer, halves to even.
_ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def encode(value, scale, CODES: tl.constexpr):
    """Encode float32 -> uint8, to the nearest code, halves to even; one scale per value, 0 where all are zero."""
    divided = tl.where(scale > 0, tl.div_rn(value, tl.where(scale > 0, scale, 1.0)), 0.0)
    if CODES == 1:
        size = tl.minimum(tl.abs(divided), 448.0)
        bits = size.to(tl.int32, bitcast=True)
        # Three bits of the mantissa are kept; the exponent's bias is 7, not 127. Below 2**-6 codes are evenly spaced.
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        small = ((size * 512.0 + _ROUNDER) - _ROUNDER).to(tl.int32)
        code = tl.where(size < 0.015625, small, normal) | ((divided.to(tl.int32, bitcast=True) >> 24) & 128)
    else:
        whole = (divided + _ROUNDER) - _ROUNDER
        code = tl.minimum(tl.maximum(whole, -127.0), 127.0).to(tl.int32)
    return (code & 255).to(tl.uint8)


@triton.jit
def decode(code, dtype: tl.constexpr, CODES: tl.constexpr):
    """Decode uint8 -> the code's value in `dtype`; every value is exact in bfloat16 and float16."""
    if _ASSEMBLY and dtype == tl.float16:
        # Not pure: the compiler would lay tiles out for products of bytes, which cannot be loaded as matrices.
        value = tl.inline_asm_elementwise(_SPREAD_FP8 if CODES == 1 else _SPREAD_INT8, "=r,=r,r", [code],
                                          dtype=tl.float16, is_pure=False, pack=4)
    elif CODES == 1:
        value = code.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        value = code.to(tl.int8, bitcast=True).to(dtype)
    return value
