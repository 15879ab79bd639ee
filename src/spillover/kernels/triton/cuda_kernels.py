"""A decoder layer on a CUDA device, in as few kernels as possible."""

from __future__ import annotations

from torch import Tensor

from spillover.kernels.attention import offloaded_attention_reference
from spillover.kernels.batch import AttentionBatch, LayerShape, LayerWeights
from spillover.kernels.cuda.attention_few import attend_few
from spillover.kernels.features import KeptRows
from spillover.kernels.linear import linear
from spillover.kernels.triton.attention.attention import attention
from spillover.kernels.triton.features import keep_rows, rows_before
from spillover.kernels.triton.norm import add_rms_norm, rms_norm
from spillover.kernels.triton.rope_store import norm_rope_store


class CudaKernels:
    def __init__(self, shape: LayerShape, cos: Tensor, sin: Tensor) -> None:
        self.shape, self.cos, self.sin = shape, cos, sin

    def attention_block(self, x: Tensor, residual: Tensor, w: LayerWeights, kv_layer: Tensor, batch: AttentionBatch,
                        window: int | None, layer: int) -> tuple[Tensor, Tensor]:
        qkv, residual = w["qkv"].format.add_norm_linear(x, residual, w["input_norm"], self.shape.eps, w["qkv"],
                                                        w.get("qkv_bias"))
        return self._attend(qkv, w, kv_layer, batch, window, layer), residual

    def attend(self, x: Tensor, w: LayerWeights, kv_layer: Tensor, batch: AttentionBatch, window: int | None,
               layer: int) -> Tensor:
        return self._attend(linear(x, w["qkv"], w.get("qkv_bias")), w, kv_layer, batch, window, layer)

    def store(self, x: Tensor, w: LayerWeights, kv_layer: Tensor, batch: AttentionBatch) -> None:
        self._store(linear(x, w["qkv"], w.get("qkv_bias")).view(len(x), -1, self.shape.head_dim), w, kv_layer, batch)

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.shape.eps)

    def _attend(self, product: Tensor, w: LayerWeights, kv_layer: Tensor, batch: AttentionBatch, window: int | None,
                layer: int) -> Tensor:
        rows, shape = len(product), self.shape
        qkv, sinks = product.view(rows, -1, shape.head_dim), w.get("sinks")
        few = attend_few(qkv, w.get("q_norm"), w.get("k_norm"), shape.eps, self.cos, self.sin, kv_layer, batch,
                         shape.num_heads, shape.scale, window, sinks)
        if few is not None:
            return linear(few.view(rows, -1), w["o"], w.get("o_bias"))
        self._store(qkv, w, kv_layer, batch)
        q = qkv[:, : shape.num_heads]
        if batch.offloaded is None:
            out = attention(q, kv_layer, batch, shape.scale, window, sinks)
        else:  # the offloaded prefix passes through its stage segment by segment
            out = offloaded_attention_reference(q, kv_layer, batch, batch.offloaded, layer, shape.scale, sinks)
        return linear(out.view(rows, -1), w["o"], w.get("o_bias"))

    def _store(self, qkv: Tensor, w: LayerWeights, kv_layer: Tensor, batch: AttentionBatch) -> None:
        """Rotate the queries of qkv [T, heads, head_dim] in place, and store its keys and values."""
        work, shape = batch.work, self.shape
        norm_rope_store(qkv, w.get("q_norm"), w.get("k_norm"), shape.eps, self.cos, self.sin, batch.positions,
                        batch.rows, None if work is None else work.slots, batch.block_table, kv_layer,
                        batch.block_size, shape.num_heads, batch.kv_dtype, work is None or work.tiles is not None)

    def mlp_block(self, x: Tensor, residual: Tensor, w: LayerWeights) -> tuple[Tensor, Tensor]:
        gate_up = w["gate_up"]
        inner, residual = gate_up.format.add_norm_linear(x, residual, w["mlp_norm"], self.shape.eps, gate_up,
                                                         w.get("gate_up_bias"), gated=True)
        return linear(inner, w["down"], w.get("down_bias")), residual

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, self.shape.eps)

    def rows_before(self, x: Tensor, kept: KeptRows, batch: AttentionBatch, slots: Tensor, follows: Tensor) -> Tensor:
        return rows_before(x, kept, batch, slots, follows)

    def keep_rows(self, x: Tensor, kept: KeptRows, batch: AttentionBatch, slots: Tensor) -> None:
        keep_rows(x, kept, batch, slots)
