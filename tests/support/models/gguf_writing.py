"""Small GGUF files for tests, written with the gguf package from HF models or plain arrays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from transformers import PreTrainedModel

Arrays = dict[str, tuple[np.ndarray, Kind]]  # values as stored (floats, or blocks as bytes) and their type


def write_gguf(path: Path, arch: str, fields: dict[str, Any], arrays: Arrays) -> Path:
    """Write a GGUF file; names in `fields` get the architecture's name as a prefix unless they are global ones."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in fields.items():
        full = key if key.startswith(("tokenizer.", "general.", "split.")) else f"{arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        else:
            writer.add_array(full, value)
    for name, (values, kind) in arrays.items():
        writer.add_tensor(name, np.ascontiguousarray(values), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_fields(**changes: Any) -> dict[str, Any]:
    return {"block_count": 1, "context_length": 128, "embedding_length": 32, "feed_forward_length": 64,
            "attention.head_count": 4, "attention.head_count_kv": 2, "rope.freq_base": 10000.0,
            "attention.layer_norm_rms_epsilon": 1e-5} | changes


def llama_arrays(kind: Kind = Kind.F32) -> Arrays:
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> tuple[np.ndarray, Kind]:
        return quantize(random.standard_normal((rows, columns), dtype=np.float32), kind), kind

    return {"token_embd.weight": matrix(48, 32), "output_norm.weight": (np.ones(32, np.float32), Kind.F32),
            "blk.0.attn_q.weight": matrix(32, 32), "blk.0.attn_k.weight": matrix(16, 32)}


def write_like_llama_cpp(path: Path, model: PreTrainedModel, arch: gguf.MODEL_ARCH, fields: dict[str, Any],
                         expert_kind: Kind = Kind.F32, kind_of: Callable[[str, int], Kind] | None = None) -> Path:
    """Write a model as llama.cpp's conversion does: its names, order of rows and experts. `kind_of`: the type of
    tensors that are not experts, by name and number of dimensions."""
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    arrays: Arrays = {}

    def add(name: str, values: np.ndarray, kind: Kind = Kind.F32) -> None:
        arrays[name] = (quantize(values, kind), kind)

    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith(("gate_up_proj", "gate_up_proj_bias")):
            block, suffix = f"blk.{name.split('.')[2]}.ffn_", ".bias" if name.endswith("bias") else ".weight"
            if arch == gguf.MODEL_ARCH.GPT_OSS:
                values = values if suffix == ".bias" else values.transpose(0, 2, 1)
                gate, up = values[:, 0::2], values[:, 1::2]
            else:
                gate, up = np.split(values, 2, axis=1)
            kind = expert_kind if suffix == ".weight" else Kind.F32
            add(f"{block}gate_exps{suffix}", gate, kind)
            add(f"{block}up_exps{suffix}", up, kind)
            continue
        if ".experts.down_proj" in name:
            block, bias = f"blk.{name.split('.')[2]}.ffn_down_exps", name.endswith("bias")
            if arch == gguf.MODEL_ARCH.GPT_OSS and not bias:
                values = values.transpose(0, 2, 1)
            add(block + (".bias" if bias else ".weight"), values, Kind.F32 if bias else expert_kind)
            continue
        if arch == gguf.MODEL_ARCH.LLAMA and ("q_proj" in name or "k_proj" in name):
            heads = model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert known is not None, name
        full = known + ("" if known.endswith((".weight", ".bias")) else ".weight")
        add(full, values, Kind.F32 if kind_of is None else kind_of(full, values.ndim))
    return write_gguf(path, gguf.MODEL_ARCH_NAMES[arch], fields, arrays)
