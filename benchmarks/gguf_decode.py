"""Decodes one request with a GGUF file of random codes, types as in llama.cpp's Q4_K_M and shapes of Llama-3.1-8B:

    PYTHONPATH=tests python benchmarks/gguf_decode.py /tmp/m.gguf [--layers 32] [--device cuda] [--codes keep|widen]

The file (4.9 GB) is written if it does not exist. Prints tokens per second, and the bytes of the weights as planned.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from spillover import LLM, SamplingParams
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
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--codes", default="keep")
    parser.add_argument("--tokens", type=int, default=256)
    given = parser.parse_args()
    if not given.path.exists():
        write(given.path, given.layers)
    start = time.perf_counter()
    with LLM(str(given.path), device=given.device, skip_tokenizer_init=True, max_model_len=2048,
             weight_codes=given.codes) as llm:
        print(f"loaded in {time.perf_counter() - start:.1f} s, weights {llm.plan.weight_bytes / 1e9:.2f} GB")
        for tokens in (16, given.tokens, given.tokens):
            start = time.perf_counter()
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            llm.generate([{"prompt_token_ids": list(range(1, 33))}], params, use_tqdm=False)
            print(f"{tokens} tokens: {tokens / (time.perf_counter() - start):.1f} tok/s")


if __name__ == "__main__":
    main()
