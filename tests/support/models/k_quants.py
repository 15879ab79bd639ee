"""Quantisers, by plain rounding, for GGUF types that the gguf package can only dequantise; and conversion of a file to
llama.cpp's Q4_K_M: `PYTHONPATH=tests python -m support.models.k_quants IN.gguf OUT.gguf`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import IQ4_NL, quantize

F = np.float32
SUPER = 256
# The types that llama.cpp uses where the row length is not a multiple of 256.
FALLBACK = {Kind.Q4_K: Kind.Q5_0, Kind.Q5_K: Kind.Q5_1, Kind.Q6_K: Kind.Q8_0}


def quantize_more(values: np.ndarray, kind: Kind) -> np.ndarray:
    """Quantise [..., columns] to any type; return bytes."""
    if kind not in (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL):
        return quantize(values, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.ascontiguousarray(values, F).reshape(-1, block)
    made = (_iq4_nl(blocks) if kind is Kind.IQ4_NL else _q6_k(blocks) if kind is Kind.Q6_K
            else _q4_k(blocks, 4 if kind is Kind.Q4_K else 5))
    assert made.shape == (len(blocks), size)
    return made.reshape(*values.shape[:-1], -1)


def _over(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Divide and round; return 0 where a scale is 0."""
    return np.rint(np.divide(values, scales, out=np.zeros_like(values), where=scales != 0))


def _half(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return [blocks, 1] as float16 bytes, and the rounded values."""
    halves = numbers.astype(np.float16)
    return halves.view(np.uint8), halves.astype(F)


def _nibbles(codes: np.ndarray, step: int) -> np.ndarray:
    groups = codes.reshape(len(codes), -1, 2, step)
    return (groups[:, :, 0] & 15 | (groups[:, :, 1] & 15) << 4).reshape(len(codes), -1)


def _q4_k(blocks: np.ndarray, bits: int) -> np.ndarray:
    """Quantise to d * sc * q - dmin * m, with six-bit sc and m for every 32 values."""
    parts = blocks.reshape(len(blocks), 8, 32)
    least = np.minimum(parts.min(-1), 0)
    steps = (parts.max(-1) - least) / F((1 << bits) - 1)
    d_bytes, d = _half(steps.max(-1, keepdims=True) / 63)
    m_bytes, dmin = _half((-least).max(-1, keepdims=True) / 63)
    sc, m = (np.clip(_over(whole, np.broadcast_to(unit, whole.shape)), 0, 63).astype(np.uint8)
             for whole, unit in ((steps, d), (-least, dmin)))
    scale, offset = (d * sc)[..., None], (dmin * m)[..., None]
    codes = np.clip(_over(parts + offset, np.broadcast_to(scale, parts.shape)), 0, (1 << bits) - 1).astype(np.uint8)
    packed = np.concatenate((sc[:, :4] | sc[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6,
                             sc[:, 4:] & 15 | (m[:, 4:] & 15) << 4), axis=-1)
    high = [] if bits == 4 else [np.packbits(codes >> 4, axis=1, bitorder="little").reshape(len(codes), 32)]
    return np.concatenate((d_bytes, m_bytes, packed, *high, _nibbles(codes.reshape(len(codes), -1), 32)), axis=-1)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    """Quantise to d * sc * (q - 32), with a signed sc for every 16 values."""
    parts = blocks.reshape(len(blocks), 16, 16)
    where = np.abs(parts).argmax(-1, keepdims=True)
    steps = np.take_along_axis(parts, where, -1)[..., 0] / -32
    d_bytes, d = _half(np.abs(steps).max(-1, keepdims=True) / 127)
    sc = np.clip(_over(steps, np.broadcast_to(d, steps.shape)), -128, 127).astype(np.int8)
    scale = np.broadcast_to((d * sc)[..., None], parts.shape)
    codes = (np.clip(_over(parts, scale), -32, 31) + 32).astype(np.uint8).reshape(len(blocks), -1)
    quarters = codes.reshape(len(blocks), 2, 4, 32) >> 4
    high = quarters[:, :, 0] | quarters[:, :, 1] << 2 | quarters[:, :, 2] << 4 | quarters[:, :, 3] << 6
    return np.concatenate((_nibbles(codes, 64), high.reshape(len(blocks), -1), sc.view(np.uint8), d_bytes), axis=-1)


def _iq4_nl(blocks: np.ndarray) -> np.ndarray:
    where = np.abs(blocks).argmax(-1, keepdims=True)
    d_bytes, d = _half(np.take_along_axis(blocks, where, -1) / -127)
    values = np.divide(blocks, d, out=np.zeros_like(blocks), where=d != 0)[..., None]
    codes = np.abs(values - np.array(IQ4_NL.kvalues, F)).argmin(-1).astype(np.uint8)
    return np.concatenate((d_bytes, _nibbles(codes, 16)), axis=-1)


def q4_k_m(name: str, columns: int, layers: int) -> Kind:
    """Return a matrix's type as llama.cpp chooses it for a dense model with tied embeddings."""
    layer = int(found[1]) if (found := re.match(r"blk\.(\d+)\.", name)) else 0
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    six = name in ("token_embd.weight", "output.weight") or (more and re.search(r"attn_v|ffn_down", name))
    kind = Kind.Q6_K if six else Kind.Q4_K
    return kind if columns % SUPER == 0 else FALLBACK[kind]


def write_q4_k_m(source: Path, target: Path) -> Path:
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    layers = reader.fields[f"{arch}.block_count"].contents()
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        kind = q4_k_m(tensor.name, shape[-1], layers) if len(shape) == 2 else Kind.F32
        writer.add_tensor(tensor.name, quantize_more(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


if __name__ == "__main__":
    write_q4_k_m(Path(sys.argv[1]), Path(sys.argv[2]))
