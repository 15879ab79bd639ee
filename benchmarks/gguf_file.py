"""Writes a GGUF file of random codes, with types as in llama.cpp's Q4_K_M and the shapes of Llama-3.1-8B (4.9 GB):

    PYTHONPATH=tests python benchmarks/gguf_file.py /tmp/m.gguf [--layers 32]
    spill lab run formats --scale gguf --model /tmp/m.gguf
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from support.models.coded_weights import stored
from support.models.k_quants import q4_k_m

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 4096, 14336, 32, 8, 128256


def write(path: Path, layers: int) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {"block_count": layers, "context_length": 8192, "embedding_length": HIDDEN, "vocab_size": VOCAB,
                       "feed_forward_length": INNER, "attention.head_count": HEADS,
                       "attention.head_count_kv": KV_HEADS}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.rope.freq_base", 5e5)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN),
              "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
              "ffn_down": (HIDDEN, INNER)}
    named = {f"blk.{layer}.{name}.weight": shape for layer in range(layers) for name, shape in shapes.items()}
    for name in ("output_norm", *(f"blk.{i}.{part}_norm" for i in range(layers) for part in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    for name, (rows, columns) in {"token_embd.weight": (VOCAB, HIDDEN), "output.weight": (VOCAB, HIDDEN),
                                  **named}.items():
        kind = Kind.Q4_K if name.startswith("token") else q4_k_m(name, columns, layers)
        some = stored(kind, 64, columns)  # repeated below, as the values do not matter
        whole = np.concatenate([some] * -(-rows // len(some)))[:rows]
        writer.add_tensor(name, whole, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    given = parser.parse_args()
    write(given.path, given.layers)


if __name__ == "__main__":
    main()
