"""Small models for fuzz_models.py to mutate: GGUF files as typed fields and tensors, and Hugging Face folders."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", UINT32: "I", INT32: "i", FLOAT32: "f", BOOL: "?", UINT64: "Q", 11: "q",
          12: "d"}
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 32, 64, 4, 2, 48
EXPERTS = 3
GROUP = 16  # columns that share a scale


@dataclass
class Gguf:
    """The content of a GGUF file; each part may be made invalid."""

    fields: list[tuple[bytes, int, Any]]  # name, type, value; of an array: (type of entries, entries), or its bytes
    tensors: list[tuple[bytes, list[int], int, int]] = field(default_factory=list)  # name, dimensions, kind, offset
    data: bytes = b""
    version: int = 3
    tensor_count: int | None = None  # number that the header states, as the next one; None for the true number
    field_count: int | None = None

    def encode(self) -> bytes:
        out = bytearray(b"GGUF" + struct.pack("<IQQ", self.version,
                                              len(self.tensors) if self.tensor_count is None else self.tensor_count,
                                              len(self.fields) if self.field_count is None else self.field_count))
        for name, kind, value in self.fields:
            out += struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + _value(kind, value)
        for name, dimensions, kind, offset in self.tensors:
            out += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dimensions))
            out += b"".join(struct.pack("<Q", size & (2**64 - 1)) for size in dimensions)
            out += struct.pack("<IQ", kind & (2**32 - 1), offset & (2**64 - 1))
        out += bytes(-len(out) % 32)
        return bytes(out) + self.data


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return struct.pack("<Q", len(value)) + value
    if kind == ARRAY:
        if isinstance(value, bytes):
            return value
        item, entries = value
        return struct.pack("<IQ", item, len(entries)) + b"".join(_value(item, entry) for entry in entries)
    code = _CODES.get(kind)
    return struct.pack("<" + code, value) if code else b"\0" * 4


def _typed(value: Any) -> tuple[int, Any]:
    if isinstance(value, bool):
        return BOOL, value
    if isinstance(value, int):
        return UINT32, value
    if isinstance(value, float):
        return FLOAT32, value
    if isinstance(value, str):
        return STRING, value.encode()
    item = _typed(value[0])[0] if value else UINT32
    return ARRAY, (INT32 if item == UINT32 else item, [_typed(entry)[1] for entry in value])


def _gguf(fields: dict[str, Any], arrays: dict[str, tuple[np.ndarray, Kind]]) -> Gguf:
    made, data = Gguf([(name.encode(), *_typed(value)) for name, value in fields.items()]), bytearray()
    for name, (values, kind) in arrays.items():
        made.tensors.append((name.encode(), list(reversed(values.shape)), int(kind), len(data)))
        data += quantize(values, kind).tobytes()
        data += bytes(-len(data) % 32)
    made.data = bytes(data)
    return made


def _letters() -> list[str]:
    return [chr(letter) for letter in range(ord("a"), ord("a") + 26)]


def byte_level_fields() -> dict[str, Any]:
    tokens = ["<s>", "</s>", *_letters(), "th", "the", "<|im_end|>", "Ġ"]
    kinds = [3, 3, *[1] * 28, 3, 1]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": ["t h", "th e"],
            "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.add_bos_token": True,
            "tokenizer.chat_template": TEMPLATE}


def sentencepiece_fields() -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", *_letters(), "th", "the", "<tool>"]
    kinds = [2, 3, 3, 6, 1, *[1] * 28, 4]
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.scores": [-float(index) for index in range(len(tokens))],
            "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.add_space_prefix": True, "tokenizer.chat_template": TEMPLATE}


def _shape_fields(arch: str) -> dict[str, Any]:
    return {"general.architecture": arch, "general.alignment": 32, f"{arch}.block_count": 1,
            f"{arch}.context_length": 128, f"{arch}.embedding_length": HIDDEN, f"{arch}.feed_forward_length": INNER,
            f"{arch}.attention.head_count": HEADS, f"{arch}.attention.head_count_kv": KV_HEADS,
            f"{arch}.rope.freq_base": 10000.0, f"{arch}.attention.layer_norm_rms_epsilon": 1e-5}


def _attention(kind: Kind, bias: bool = False) -> dict[str, tuple[np.ndarray, Kind]]:
    draw = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> tuple[np.ndarray, Kind]:
        return draw.standard_normal((rows, columns), dtype=np.float32), kind

    ones = (np.ones(HIDDEN, np.float32), Kind.F32)
    kv = HIDDEN * KV_HEADS // HEADS
    arrays = {"token_embd.weight": matrix(VOCAB, HIDDEN), "output_norm.weight": ones, "blk.0.attn_norm.weight": ones,
              "blk.0.ffn_norm.weight": ones, "blk.0.attn_q.weight": matrix(HIDDEN, HIDDEN),
              "blk.0.attn_k.weight": matrix(kv, HIDDEN), "blk.0.attn_v.weight": matrix(kv, HIDDEN),
              "blk.0.attn_output.weight": matrix(HIDDEN, HIDDEN)}
    if bias:
        arrays |= {f"blk.0.attn_{name}.bias": (np.ones(size, np.float32), Kind.F32)
                   for name, size in (("q", HIDDEN), ("k", kv), ("v", kv), ("output", HIDDEN))}
    return arrays


def gguf_models() -> dict[str, Gguf]:
    """Return models for every branch of the reader: two kinds of vocabulary, codes, Llama 3's rope, experts, MXFP4."""
    draw = np.random.default_rng(1)

    def values(*shape: int) -> np.ndarray:
        return draw.standard_normal(shape, dtype=np.float32)

    def mlp(kind: Kind) -> dict[str, tuple[np.ndarray, Kind]]:
        return {"blk.0.ffn_gate.weight": (values(INNER, HIDDEN), kind),
                "blk.0.ffn_up.weight": (values(INNER, HIDDEN), kind),
                "blk.0.ffn_down.weight": (values(HIDDEN, INNER), kind)}

    def experts(kind: Kind, bias: bool) -> dict[str, tuple[np.ndarray, Kind]]:
        made = {"blk.0.ffn_gate_inp.weight": (values(EXPERTS, HIDDEN), Kind.F32),
                "blk.0.ffn_gate_exps.weight": (values(EXPERTS, INNER, HIDDEN), kind),
                "blk.0.ffn_up_exps.weight": (values(EXPERTS, INNER, HIDDEN), kind),
                "blk.0.ffn_down_exps.weight": (values(EXPERTS, HIDDEN, INNER), kind)}
        if bias:
            made |= {"blk.0.ffn_gate_inp.bias": (values(EXPERTS), Kind.F32),
                     "blk.0.attn_sinks.weight": (values(HEADS), Kind.F32),
                     "blk.0.ffn_gate_exps.bias": (values(EXPERTS, INNER), Kind.F32),
                     "blk.0.ffn_up_exps.bias": (values(EXPERTS, INNER), Kind.F32),
                     "blk.0.ffn_down_exps.bias": (values(EXPERTS, HIDDEN), Kind.F32)}
        return made

    rope = {"rope_freqs.weight": (np.ones(HIDDEN // HEADS // 2, np.float32), Kind.F32)}
    mixture = {"expert_count": EXPERTS, "expert_used_count": 2}
    moe = _shape_fields("qwen3moe") | {f"qwen3moe.{name}": value for name, value in mixture.items()}
    moe |= {"qwen3moe.expert_feed_forward_length": INNER}
    mixtral = _shape_fields("llama") | {f"llama.{name}": value for name, value in mixture.items()}
    oss = _shape_fields("gpt-oss") | {f"gpt-oss.{name}": value for name, value in mixture.items()}
    oss |= {"gpt-oss.expert_feed_forward_length": INNER, "gpt-oss.attention.sliding_window": 16,
            "gpt-oss.rope.scaling.type": "yarn", "gpt-oss.rope.scaling.factor": 4.0,
            "gpt-oss.rope.scaling.original_context_length": 32}
    norms = {f"blk.0.attn_{name}_norm.weight": (np.ones(HIDDEN // HEADS, np.float32), Kind.F32) for name in "qk"}
    post = {"blk.0.post_attention_norm.weight": (np.ones(HIDDEN, np.float32), Kind.F32)}
    return {
        "gguf-llama": _gguf(_shape_fields("llama") | byte_level_fields(), _attention(Kind.F32) | mlp(Kind.F16) | rope),
        "gguf-codes": _gguf(_shape_fields("llama") | sentencepiece_fields(), _attention(Kind.Q4_1) | mlp(Kind.Q8_0)),
        "gguf-mixtral": _gguf(mixtral | sentencepiece_fields(), _attention(Kind.F32) | experts(Kind.F16, False)),
        "gguf-qwen3moe": _gguf(moe | byte_level_fields(), _attention(Kind.BF16) | norms | experts(Kind.Q8_0, False)),
        "gguf-gpt-oss": _gguf(oss | byte_level_fields(),
                              _attention(Kind.F32, bias=True) | post | experts(Kind.MXFP4, True)),
    }


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...]]],
                 sharded: bool) -> Path:
    """Write a folder as on the Hugging Face hub: configs, tokenizer, weights in one file or in two with an index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1], "temperature": 0.6, "top_p": 0.9}))
    tokens = ["<s>", "</s>", *_letters(), "th", "the", "Ġ"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[("t", "h"), ("th", "e")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": TEMPLATE}))
    names = sorted(tensors)
    halves = [names[::2], names[1::2]] if sharded else [names]
    weight_map = {}
    for index, half in enumerate(halves, start=1):
        file = f"model-0000{index}-of-00002.safetensors" if sharded else "model.safetensors"
        weight_map |= dict.fromkeys(half, file)
        write_safetensors(folder / file, {name: tensors[name] for name in half})
    if sharded:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_safetensors(file: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    draw, header, data = np.random.default_rng(2), {"__metadata__": {"format": "pt"}}, bytearray()
    for name, (kind, shape) in tensors.items():
        if name.endswith("g_idx"):
            values = (np.arange(shape[0], dtype=np.int32) // GROUP).tobytes()
        elif kind in ("F32", "F16"):
            values = draw.standard_normal(shape).astype(np.float32 if kind == "F32" else np.float16).tobytes()
        else:  # any bytes are codes; below 127 they are FP8 numbers too
            values = draw.integers(0, 127, (*shape, 4 if kind == "I32" else 1), dtype=np.uint8).tobytes()
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def folder_configs() -> dict[str, dict[str, Any]]:
    shape = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2,
             "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 128,
             "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "dtype": "float32", "hidden_act": "silu", "bos_token_id": 0,
             "eos_token_id": 1, "tie_word_embeddings": False}
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0,
            "mscale_all_dim": 0.7}
    sliding = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1,
               "layer_types": ["full_attention", "sliding_attention"]}
    mixture = {"architectures": ["MixtralForCausalLM"], "num_local_experts": EXPERTS, "num_experts_per_tok": 2,
               "sliding_window": None}
    return {
        "folder-llama": shape | {"architectures": ["LlamaForCausalLM"], "rope_scaling": scaling,
                                 "attention_bias": True},
        "folder-qwen2": shape | {"architectures": ["Qwen2ForCausalLM"], "rope_scaling": yarn} | sliding,
        "folder-qwen3-moe": shape | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": EXPERTS, "head_dim": 8,
                                     "num_experts_per_tok": 2, "moe_intermediate_size": INNER, "decoder_sparse_step": 1,
                                     "mlp_only_layers": [1], "norm_topk_prob": True},
        "folder-mixtral": shape | mixture,
        "folder-gpt-oss": shape | {"architectures": ["GptOssForCausalLM"], "num_local_experts": EXPERTS, "head_dim": 8,
                                   "num_experts_per_tok": 2, "sliding_window": 16, "swiglu_limit": 7.0},
        "folder-awq": shape | mixture | {"quantization_config": {
            "quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True,
            "modules_to_not_convert": ["model.layers.1.self_attn"]}},
        "folder-gptq": shape | {"architectures": ["LlamaForCausalLM"], "quantization_config": {
            "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False, "lm_head": True,
            "checkpoint_format": "gptq_v2", "dynamic": {"-:.*layers\\.1.*o_proj": {}, "+:.*down": {"bits": 8}}}},
        "folder-compressed-tensors": shape | {"architectures": ["LlamaForCausalLM"], "quantization_config": {
            "quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["re:.*lm_head"],
            "config_groups": {
                "group_0": _scheme("pack-quantized", "Linear", "int", 4, "group", group_size=GROUP, symmetric=False),
                "group_1": _scheme("int-quantized", "re:.*o_proj", "int", 8, "channel"),
                "group_2": _scheme("float-quantized", "re:.*up_proj", "float", 8, "channel"),
                "group_3": _scheme("nvfp4-pack-quantized", "model.layers.0.mlp.down_proj", "float", 4, "tensor_group",
                                   group_size=16),
                "group_4": _scheme("mxfp4-pack-quantized", "re:.*1.mlp.down_proj", "float", 4, "group", group_size=32),
            }}},
        "folder-fp8": shape | mixture | {"quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "gate"]}},
        "folder-modelopt": shape | mixture | {"quantization_config": {
            "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head", "*.gate"]}},
    }


def _scheme(stored: str, target: str, kind: str, bits: int, strategy: str, **weights: Any) -> dict[str, Any]:
    return {"format": stored, "targets": [target], "weights": {"type": kind, "num_bits": bits, "strategy": strategy,
                                                               "symmetric": True, **weights}}
