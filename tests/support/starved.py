"""Small models of each kind, and engines with less device memory than the weights need."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spillover import LLM, SamplingParams
from spillover.engine.weights.traffic import WeightTraffic
from spillover.errors import PlanError
from spillover.plan.planner import Plan
from spillover.units import parse_bytes

VOCABULARY = 512
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "max_position_embeddings": 512, "eos_token_id": 2,
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "float32",
}
_QWEN3_MOE = {
    **_COMMON, "architectures": ["Qwen3MoeForCausalLM"], "intermediate_size": 512, "moe_intermediate_size": 256,
    "num_hidden_layers": 5, "num_experts": 16, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [1],
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "architectures": ["LlamaForCausalLM"], "intermediate_size": 1024, "num_hidden_layers": 6},
    "mixtral": {
        **_COMMON, "architectures": ["MixtralForCausalLM"], "intermediate_size": 512, "num_hidden_layers": 4,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "qwen3-moe": _QWEN3_MOE,
    "qwen3-moe-fp8": {**_QWEN3_MOE, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    "gpt-oss": {
        **_COMMON, "architectures": ["GptOssForCausalLM"], "intermediate_size": 256, "num_hidden_layers": 4,
        "num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": 32, "attention_bias": True,
        "quantization_config": {"quant_method": "mxfp4"},
    },
}
MIXTURES = [name for name in MODELS if name != "llama"]


@dataclass(frozen=True)
class Answers:
    tokens: list[list[int]]
    plan: Plan
    weights: Any
    traffic: WeightTraffic
    device_bytes: int  # bytes of weights on the device
    host_bytes: int


def write_config(folder: Path, name: str) -> str:
    (folder / "config.json").write_text(json.dumps(MODELS[name]))
    return str(folder)


def prompts(count: int = 4, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (70, 3, 33, 90, 1, 17)[:count]]


def answer(folder: str, asked: list[list[int]], tokens: int = 10, **flags: Any) -> Answers:
    flags = {"gpu_memory": "256MB", "max_model_len": 160, "max_num_seqs": 4, "max_num_batched_tokens": 64,
             "load_format": "dummy", "skip_tokenizer_init": True, **flags}
    with LLM(folder, **flags) as llm:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs = llm.generate(asked, params, use_tqdm=False)
        weights = llm.engine.runner.weights
        return Answers([list(output.outputs[0].token_ids) for output in outputs], llm.plan, weights,
                       weights.traffic(), weights.nbytes, weights.host_bytes)


def least(folder: str, **flags: Any) -> int:
    """Return the smallest possible budget, read from the error message for a smaller one."""
    with pytest.raises(PlanError) as refusal:
        answer(folder, [], gpu_memory="1MB", **flags)
    return parse_bytes(re.findall(r"at least ([0-9.]+[KMG]iB)", str(refusal.value))[-1])
