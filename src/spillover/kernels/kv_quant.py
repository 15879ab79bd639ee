"""KV in one byte per value: float8 (e4m3fn) or int8 codes with one float32 scale per token and head; codecs of blocks.

A head of a block is block_size * head_dim codes, keys by dimension and values by token, then block_size little-endian
scales: block_size * (head_dim + 4) bytes. value = code * scale, and scale = the largest magnitude over head_dim / the
largest code. Codes are made by a true division, rounded to nearest, ties to even. Below the device blocks may also be
in four bits ("int4"), which `kv_int4` describes.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spillover.kernels import kv_int4, native

SCALE_BYTES = 4
QUANT_LAYOUT = "head:codes,token:f32-scale"
_LARGEST = {"fp8": 448.0, "int8": 127.0}
_CODE = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
# Numbers of codecs in the native kernels, by the type of encoded blocks and the type of the pool.
_KINDS = {("int8", "auto"): 0, ("fp8", "auto"): 1, ("int4", "auto"): 2, ("int4", "int8"): 3, ("int4", "fp8"): 4}


def head_bytes(block_size: int, head_dim: int, kv_dtype: str = "int8") -> int:
    """Return the bytes of one head of a block, keys or values; fp8 takes as many as int8."""
    return block_size * row_bytes(head_dim, kv_dtype)


def row_bytes(head_dim: int, kv_dtype: str) -> int:
    """Return the bytes of one token in one head, keys or values."""
    return head_dim // 2 + kv_int4.SCALE_BYTES if kv_dtype == "int4" else head_dim + SCALE_BYTES


def slot_layout(spill_dtype: str) -> str:
    """Return the name of the layout that blocks have below the device, which is part of their identity."""
    return kv_int4.LAYOUT if spill_dtype == "int4" else QUANT_LAYOUT


def encode(x: Tensor, kv_dtype: str, dim: int = -1) -> tuple[Tensor, Tensor]:
    """Return codes (uint8, shaped as x) and scales (float32, without `dim`), one for all values along `dim`."""
    x, largest = x.float(), _LARGEST[kv_dtype]
    top = x.abs().amax(dim, keepdim=True)
    scales = top / torch.full_like(top, largest)  # for a scalar, CUDA would multiply by its reciprocal
    # A scale is 0 if all values are zeros, or so small that the scale underflows.
    ratio = torch.where(scales > 0, x / scales, 0.0).clamp(-largest, largest)
    codes = (ratio.round() if kv_dtype == "int8" else ratio).to(_CODE[kv_dtype])
    return codes.view(torch.uint8), scales.squeeze(dim)


def decode(codes: Tensor, scales: Tensor, kv_dtype: str, dim: int = -1) -> Tensor:
    """Return the values in float32."""
    return codes.view(_CODE[kv_dtype]).float() * scales.unsqueeze(dim)


def views(quantised: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return views of [..., 2, Hk, head_bytes]: key codes [..., Hk, D, bs], their scales [..., Hk, bs], value codes
    [..., Hk, bs, D], their scales. Writing to them writes to the block."""
    head_dim = quantised.shape[-1] // block_size - SCALE_BYTES
    size = block_size * head_dim
    codes, scales = quantised[..., :size], quantised[..., size:].view(torch.float32)
    keys = _split(codes[..., 0, :, :], head_dim, block_size)
    values = _split(codes[..., 1, :, :], block_size, head_dim)
    return keys, scales[..., 0, :, :], values, scales[..., 1, :, :]


def encode_blocks(x: Tensor, block_size: int, kv_dtype: str) -> Tensor:
    """Encode x [..., 2, Hk, bs * D] of any float type -> [..., 2, Hk, head_bytes] uint8."""
    head_dim = x.shape[-1] // block_size
    if kv_dtype == "int4":
        both = (key_view(x[..., 0, :, :], block_size, head_dim), _split(x[..., 1, :, :], block_size, head_dim).mT)
        made4 = (kv_int4.encode(part) for part in both)
        heads = [torch.cat((codes.flatten(-2), scales.view(torch.uint8)), -1) for codes, scales in made4]
        return torch.stack(heads, -3)
    out = torch.empty(*x.shape[:-1], head_bytes(block_size, head_dim), dtype=torch.uint8, device=x.device)
    keys, key_scales, values, value_scales = views(out, block_size)
    for source, dim, codes, scales in (
        (key_view(x[..., 0, :, :], block_size, head_dim), -2, keys, key_scales),
        (_split(x[..., 1, :, :], block_size, head_dim), -1, values, value_scales),
    ):
        made = encode(source, kv_dtype, dim)
        codes.copy_(made[0])
        scales.copy_(made[1])
    return out


def key_view(keys: Tensor, block_size: int, head_dim: int) -> Tensor:
    """Return a view [..., D, bs] of the keys [..., bs * D] of a full-precision pool: 16-bit ones are by token."""
    by_token = keys.dtype.itemsize == 2
    return _split(keys, block_size, head_dim).mT if by_token else _split(keys, head_dim, block_size)


def decode_blocks(quantised: Tensor, block_size: int, kv_dtype: str, dtype: torch.dtype) -> Tensor:
    """Decode [..., 2, Hk, head_bytes] uint8 -> [..., 2, Hk, bs * D]."""
    if kv_dtype == "int4":
        return _decode_int4(quantised, block_size, dtype)
    keys, key_scales, values, value_scales = views(quantised, block_size)
    whole = torch.empty(*quantised.shape[:-1], block_size * keys.shape[-2], dtype=dtype, device=quantised.device)
    key_view(whole[..., 0, :, :], block_size, keys.shape[-2]).copy_(decode(keys, key_scales, kv_dtype, -2))
    _split(whole[..., 1, :, :], block_size, keys.shape[-2]).copy_(decode(values, value_scales, kv_dtype, -1))
    return whole


def _decode_int4(quantised: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    half = quantised.shape[-1] // block_size - kv_int4.SCALE_BYTES  # half of the head's dimensions
    codes = _split(quantised[..., : half * block_size], half, block_size)
    x = kv_int4.decode(codes, quantised[..., half * block_size :].view(torch.bfloat16))  # [..., 2, Hk, D, bs]
    if dtype is torch.float16:  # a rounding error near the largest value must not become infinity
        x = x.clamp(-65504.0, 65504.0)
    whole = torch.empty(*quantised.shape[:-1], block_size * 2 * half, dtype=dtype, device=quantised.device)
    key_view(whole[..., 0, :, :], block_size, 2 * half).copy_(x[..., 0, :, :, :])
    _split(whole[..., 1, :, :], block_size, 2 * half).copy_(x[..., 1, :, :, :].mT)
    return whole


@dataclass(frozen=True)
class KVCodec:
    """A codec between whole blocks [layers, 2, Hk, bs * D] of a pool and narrower ones, as bytes. With int4 the pool
    may itself have codes, which are decoded first."""

    layers: int
    kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype  # type of the pool
    kv_dtype: str  # type of encoded blocks: "fp8", "int8" or "int4"
    pool_dtype: str = "auto"  # "fp8" or "int8": the pool has these codes, and `dtype` is uint8; "auto": plain values

    @property
    def block_bytes(self) -> int:
        return math.prod(self._shape) * self.dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * head_bytes(self.block_size, self.head_dim, self.kv_dtype)

    def encode(self, block: memoryview, slot: memoryview) -> None:
        """Encode a block into a slot, both in main memory, on the calling thread alone."""
        self._check(block, slot)
        if (library := self.native()) is not None:
            library.encode_block(_address(block), _address(slot), *self.numbers)
        else:
            self._tensor(slot).copy_(self.encode_tensor(self._tensor(block)))

    def decode(self, slot: memoryview, block: memoryview) -> None:
        self._check(block, slot)
        if (library := self.native()) is not None:
            library.decode_block(_address(slot), _address(block), *self.numbers)
        else:
            self._tensor(block).copy_(self.decode_tensor(self._tensor(slot)))

    @property
    def one_layer(self) -> KVCodec:
        """Return the codec of one layer of these blocks."""
        return replace(self, layers=1)

    def encode_tensor(self, blocks: Tensor) -> Tensor:
        """Encode [..., block_bytes] uint8 -> [..., slot_bytes] uint8, on the same device."""
        x = _split(blocks.view(self.dtype), *self._shape)
        if self.pool_dtype != "auto":
            x = decode_blocks(x, self.block_size, self.pool_dtype, torch.float32)
        return encode_blocks(x, self.block_size, self.kv_dtype).flatten(-4)

    def decode_tensor(self, slots: Tensor) -> Tensor:
        shape = (*self._shape[:-1], head_bytes(self.block_size, self.head_dim, self.kv_dtype))
        dtype = self.dtype if self.pool_dtype == "auto" else torch.float32
        x = decode_blocks(_split(slots, *shape), self.block_size, self.kv_dtype, dtype)
        if self.pool_dtype != "auto":
            x = encode_blocks(x, self.block_size, self.pool_dtype)
        return x.flatten(-4).view(torch.uint8)

    def encode_pool(self, pool: Tensor, blocks: Tensor) -> Tensor:
        """Encode blocks [n] int64 of a pool [num_blocks, block_bytes] uint8 -> [n, slot_bytes] uint8, on its device."""
        if pool.is_cuda:
            x = _split(pool.view(self.dtype), *self._shape)
            if self.kv_dtype == "int4":
                from spillover.kernels.triton import int4_codec

                return int4_codec.encode_blocks(x, blocks, self.block_size, self.pool_dtype).flatten(1)
            from spillover.kernels.triton import block_codec

            return block_codec.encode_blocks(x, blocks, self.block_size, self.kv_dtype).flatten(1)
        return self.encode_tensor(pool[blocks])

    def decode_pool(self, slots: Tensor, pool: Tensor, blocks: Tensor) -> None:
        """Decode slots [n, slot_bytes] uint8 to `blocks` [n] int64 of the pool."""
        if pool.is_cuda:
            x = _split(pool.view(self.dtype), *self._shape)
            if self.kv_dtype == "int4":
                from spillover.kernels.triton import int4_codec

                int4_codec.decode_blocks(slots, x, blocks, self.block_size, self.pool_dtype)
                return
            from spillover.kernels.triton import block_codec

            block_codec.decode_blocks(slots, x, blocks, self.block_size, self.kv_dtype)
        else:
            pool[blocks] = self.decode_tensor(slots)

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        coded = self.pool_dtype != "auto"
        size = head_bytes(self.block_size, self.head_dim) if coded else self.block_size * self.head_dim
        return self.layers, 2, self.kv_heads, size

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the sizes and the number of the codec, as arguments of the native kernels."""
        return self.layers, self.kv_heads, self.head_dim, self.block_size, _KINDS[self.kv_dtype, self.pool_dtype]

    def native(self) -> ctypes.CDLL | None:
        """Return the native library if it supports this codec: a pool of float32 or codes, and a block size and head
        dimension that are multiples of 8; else None."""
        if self.dtype not in (torch.float32, torch.uint8) or self.block_size % 8 or self.head_dim % 8:
            return None
        return native.library()

    def _check(self, block: memoryview, slot: memoryview) -> None:
        if block.nbytes != self.block_bytes or slot.nbytes != self.slot_bytes:
            raise ValueError(f"blocks are {self.block_bytes} bytes and slots {self.slot_bytes}, "
                             f"not {block.nbytes} and {slot.nbytes}")

    @staticmethod
    def _tensor(memory: memoryview) -> Tensor:
        return torch.frombuffer(memory, dtype=torch.uint8)


def _split(x: Tensor, *shape: int) -> Tensor:
    """Return a view whose last dimension is split into `shape`."""
    return x.view(*x.shape[:-1], *shape)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
