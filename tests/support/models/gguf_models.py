"""A small Llama in a GGUF file whose matrices consist of whole tiles (16 channels by 128 inputs) and blocks of 256."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Kind

from support.models.gguf_writing import Arrays, llama_fields, write_gguf
from support.models.k_quants import quantize_more

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB, LAYERS = 256, 512, 4, 2, 96, 2


def write_tiled_llama(path: Path, kind_of: Callable[[str], Kind], tied: bool = False) -> Path:
    """Write the model; `kind_of` returns the type of a matrix for its name in the file."""
    random, kv = np.random.default_rng(0), HIDDEN // HEADS * KV_HEADS
    layer = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN),
             "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
             "ffn_down": (HIDDEN, INNER)}
    shapes = {"token_embd.weight": (VOCAB, HIDDEN)} | ({} if tied else {"output.weight": (VOCAB, HIDDEN)})
    arrays: Arrays = {"output_norm.weight": (np.ones(HIDDEN, np.float32), Kind.F32)}
    for index in range(LAYERS):
        shapes |= {f"blk.{index}.{name}.weight": shape for name, shape in layer.items()}
        arrays |= {f"blk.{index}.{name}.weight": (np.ones(HIDDEN, np.float32), Kind.F32)
                   for name in ("attn_norm", "ffn_norm")}
    for name, shape in shapes.items():
        values = (random.standard_normal(shape) * (1 if "token" in name else shape[1] ** -0.5)).astype(np.float32)
        arrays[name] = quantize_more(values, kind_of(name)), kind_of(name)
    fields = llama_fields(block_count=LAYERS, context_length=256, embedding_length=HIDDEN, feed_forward_length=INNER)
    return write_gguf(path, "llama", fields | {"vocab_size": VOCAB}, arrays)


def write_tiled_mixture(path: Path, kind_of: Callable[[str], Kind], layers: int = 1, experts: int = 8,
                        quantize: Callable[[np.ndarray, Kind], np.ndarray] = quantize_more) -> Path:
    """Write a qwen3moe with 2 experts per token; `kind_of` returns the type of experts for their name in the file."""
    random, head = np.random.default_rng(0), HIDDEN // HEADS
    kv, inner = head * KV_HEADS, 256
    layer = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN),
             "attn_output": (HIDDEN, HIDDEN), "ffn_gate_inp": (experts, HIDDEN),
             "ffn_gate_exps": (experts, inner, HIDDEN), "ffn_up_exps": (experts, inner, HIDDEN),
             "ffn_down_exps": (experts, HIDDEN, inner)}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output.weight": (VOCAB, HIDDEN)}
    arrays: Arrays = {"output_norm.weight": (np.ones(HIDDEN, np.float32), Kind.F32)}
    for index in range(layers):
        shapes |= {f"blk.{index}.{name}.weight": shape for name, shape in layer.items()}
        arrays |= {f"blk.{index}.{name}.weight": (np.ones(size, np.float32), Kind.F32) for name, size in
                   (("attn_norm", HIDDEN), ("ffn_norm", HIDDEN), ("attn_q_norm", head), ("attn_k_norm", head))}
    for name, shape in shapes.items():
        values = (random.standard_normal(shape) * (1 if "token" in name else shape[-1] ** -0.5)).astype(np.float32)
        kind = kind_of(name) if "exps" in name else Kind.F32
        arrays[name] = values if kind is Kind.F32 else quantize(values, kind), kind
    fields = llama_fields(block_count=layers, context_length=256, embedding_length=HIDDEN, feed_forward_length=INNER)
    fields |= {"vocab_size": VOCAB, "expert_count": experts, "expert_used_count": 2,
               "expert_feed_forward_length": inner,
               "attention.key_length": head, "attention.value_length": head}
    return write_gguf(path, "qwen3moe", fields, arrays)


def mixed(name: str) -> Kind:
    """Choose as llama.cpp's Q4_K_M: Q6_K for the output, and the last layer's v and MLP down projection."""
    return Kind.Q6_K if name == "output.weight" or name.startswith(("blk.1.attn_v", "blk.1.ffn_down")) else Kind.Q4_K
