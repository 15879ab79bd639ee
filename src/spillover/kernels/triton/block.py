"""The two halves of a dense decoder layer, as few kernels as there can be."""

from __future__ import annotations

from torch import Tensor

from spillover.kernels.batch import AttentionBatch, LayerShape
from spillover.kernels.block import LayerWeights
from spillover.kernels.linear import linear
from spillover.kernels.triton.attention import attention
from spillover.kernels.triton.norm import add_rms_norm
from spillover.kernels.triton.rope_store import norm_rope_store


def attention_block(
    x: Tensor,
    residual: Tensor,
    w: LayerWeights,
    shape: LayerShape,
    cos: Tensor,
    sin: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """As `kernels.block.attention_block`."""
    rows = x.shape[0]
    x, residual = add_rms_norm(x, residual, w["input_norm"], shape.eps)
    qkv = linear(x, w["qkv"], w.get("qkv_bias")).view(rows, -1, shape.head_dim)
    slots = None if batch.work is None else batch.work.slots
    norm_rope_store(qkv, w.get("q_norm"), w.get("k_norm"), shape.eps, cos, sin, batch.positions, batch.rows, slots,
                    batch.block_table, kv_layer, batch.block_size, shape.num_heads, batch.kv_dtype)
    out = attention(qkv[:, : shape.num_heads], kv_layer, batch, shape.scale, window, w.get("sinks"))
    return linear(out.view(rows, -1), w["o"], w.get("o_bias")), residual


def mlp_block(x: Tensor, residual: Tensor, w: LayerWeights, shape: LayerShape) -> tuple[Tensor, Tensor]:
    """As `kernels.block.mlp_block`."""
    x, residual = add_rms_norm(x, residual, w["mlp_norm"], shape.eps, begin_early=x.shape[0] == 1)
    gate_up = w["gate_up"]
    inner = gate_up.format.linear_silu(x, gate_up, w.get("gate_up_bias"))
    return linear(inner, w["down"], w.get("down_bias")), residual
