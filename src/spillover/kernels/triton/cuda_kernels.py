"""A decoder layer on a CUDA device, as few kernels as there can be."""

from __future__ import annotations

from torch import Tensor

from spillover.kernels.attention import cold_attention_reference
from spillover.kernels.batch import AttentionBatch, LayerShape, LayerWeights
from spillover.kernels.linear import linear
from spillover.kernels.triton.attention.attention import attention
from spillover.kernels.triton.norm import add_rms_norm
from spillover.kernels.triton.rope_store import norm_rope_store


class CudaKernels:
    def __init__(self, shape: LayerShape, cos: Tensor, sin: Tensor) -> None:
        self.shape, self.cos, self.sin = shape, cos, sin

    def attention_block(self, x: Tensor, residual: Tensor, w: LayerWeights, kv_layer: Tensor, batch: AttentionBatch,
                        window: int | None, layer: int) -> tuple[Tensor, Tensor]:
        rows, shape = x.shape[0], self.shape
        x, residual = add_rms_norm(x, residual, w["input_norm"], shape.eps)
        qkv = linear(x, w["qkv"], w.get("qkv_bias")).view(rows, -1, shape.head_dim)
        slots = None if batch.work is None else batch.work.slots
        norm_rope_store(qkv, w.get("q_norm"), w.get("k_norm"), shape.eps, self.cos, self.sin, batch.positions,
                        batch.rows, slots, batch.block_table, kv_layer, batch.block_size, shape.num_heads,
                        batch.kv_dtype)
        q, sinks = qkv[:, : shape.num_heads], w.get("sinks")
        if batch.cold is None:
            out = attention(q, kv_layer, batch, shape.scale, window, sinks)
        else:  # segment by segment, as the prefix passes through its stage
            out = cold_attention_reference(q, kv_layer, batch, batch.cold, layer, shape.scale, sinks)
        return linear(out.view(rows, -1), w["o"], w.get("o_bias")), residual

    def mlp_block(self, x: Tensor, residual: Tensor, w: LayerWeights) -> tuple[Tensor, Tensor]:
        x, residual = add_rms_norm(x, residual, w["mlp_norm"], self.shape.eps, begin_early=x.shape[0] == 1)
        gate_up = w["gate_up"]
        inner = gate_up.format.linear_silu(x, gate_up, w.get("gate_up_bias"))
        return linear(inner, w["down"], w.get("down_bias")), residual

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, self.shape.eps)
