"""Models and machines for the plan tests."""

from __future__ import annotations

from dataclasses import replace

from spillover.models.architectures import gpt_oss, llama, qwen3_moe
from spillover.models.config import ModelConfig
from spillover.plan.hardware import CudaDevice, Machine
from spillover.plan.rates import Rates

GIB = 1 << 30

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    rms_norm_eps=1e-5,
    rope_theta=100_000.0,
    max_position=8192,
    tie_embeddings=True,
    dtype="bfloat16",
)
SMOLLM2_SPECS = llama.weight_specs(SMOLLM2)

TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=100,
    hidden_size=8,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    intermediate_size=16,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    max_position=64,
)
TINY_SPECS = llama.weight_specs(TINY)

MIXTURE = replace(
    TINY,
    architecture="Qwen3MoeForCausalLM",
    qk_norm=True,
    num_experts=8,
    experts_per_token=2,
    expert_intermediate_size=4,
)
MIXTURE_SPECS = qwen3_moe.weight_specs(MIXTURE)

GPT_OSS = ModelConfig(
    architecture="GptOssForCausalLM",
    vocab_size=8192,
    hidden_size=2880,
    num_layers=4,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    intermediate_size=2880,
    rms_norm_eps=1e-5,
    rope_theta=150_000.0,
    max_position=131072,
    windows=(128, None, 128, None),
    qkv_bias=True,
    o_bias=True,
    sinks=True,
    num_experts=8,
    experts_per_token=4,
    expert_intermediate_size=2880,
    expert_format="mxfp4",
    swiglu_limit=7.0,
    dtype="bfloat16",
)
GPT_OSS_SPECS = gpt_oss.weight_specs(GPT_OSS)

CPU = Machine(
    cpu="A CPU",
    cores=2,
    cpu_quota=None,
    memory_total=24 * GIB,
    memory_available=20 * GIB,
    memory_limit=None,
    memlock=None,
    last_level_cache=32 << 20,
    process_bytes=250_000_000,
    cache_folder="/tmp",
    cache_free=100 * GIB,
    python_version="3.12.0",
    torch_version="2.0",
    torch_threads=2,
)
GPU = replace(CPU, cuda=(CudaDevice(0, "A GPU", 24 * GIB, 20 * GIB, (9, 0)),))

RATES = Rates(device="cpu", memory_read=25e9, float32=250e9)
