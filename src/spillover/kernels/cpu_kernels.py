"""A decoder layer on the CPU: each half is one native call if the formats of its weights allow it, and all layers are
one if their weights stay in place, so that a step with few rows does not wait for Python.

The native kernels overwrite x and the residual and return them; use only the returned tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spillover.kernels import native
from spillover.kernels.activation import silu_and_mul
from spillover.kernels.attention import POOL_KINDS, attention, native_block_stride, store_kv
from spillover.kernels.batch import AttentionBatch, LayerShape, LayerWeights
from spillover.kernels.extents import EXPERT_SCRATCH_BYTES
from spillover.kernels.features import KeptRows, keep_rows, rows_before
from spillover.kernels.formats.base import Linear
from spillover.kernels.linear import linear
from spillover.kernels.moe.moe import ResidentExperts, Routing
from spillover.kernels.norm import add_rms_norm, rms_norm
from spillover.kernels.rope import rope


class CpuKernels:
    def __init__(self, shape: LayerShape, cos: Tensor, sin: Tensor) -> None:
        self.shape, self.cos, self.sin = shape, cos, sin

    def attention_block(self, x: Tensor, residual: Tensor, w: LayerWeights, kv_layer: Tensor, batch: AttentionBatch,
                        window: int | None, layer: int) -> tuple[Tensor, Tensor]:
        library, shape = native.fused(), self.shape
        qkv, o, q_norm = w["qkv"], w["o"], w.get("q_norm")
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        stride = native_block_stride(kv_layer, x, kv_heads, dim, batch)
        kinds = qkv.format.panel_kind, o.format.panel_kind
        if library is None or stride is None or None in kinds or batch.offloaded is not None:
            return self.attention_block_unfused(x, residual, w, kv_layer, batch, window, layer)
        rows, hidden = x.shape
        width = (2 if q_norm is None else 3) * (heads + kv_heads) * dim
        scratch = torch.empty(rows * (hidden + width))
        library.attention_block(
            *(x.data_ptr(), residual.data_ptr(), w["input_norm"].data_ptr(), shape.eps, qkv.tensors[0].data_ptr()),
            *(kinds[0], native.pointer(w.get("qkv_bias")), native.pointer(q_norm), native.pointer(w.get("k_norm"))),
            *(self.cos.data_ptr(), self.sin.data_ptr(), kv_layer.data_ptr(), stride),
            *(batch.positions.data_ptr(), batch.rows.data_ptr(), *batch.query_arguments),
            *(shape.scale, window or 0, native.pointer(w.get("sinks"))),
            *(o.tensors[0].data_ptr(), kinds[1], native.pointer(w.get("o_bias"))),
            *(rows, hidden, heads, kv_heads, dim, batch.block_size, POOL_KINDS[batch.kv_dtype], scratch.data_ptr()),
        )
        return x, residual

    def mlp_block(self, x: Tensor, residual: Tensor, w: LayerWeights) -> tuple[Tensor, Tensor]:
        library = native.fused()
        gate_up, down = w["gate_up"], w["down"]
        kinds = gate_up.format.panel_kind, down.format.panel_kind
        if library is None or None in kinds:
            return self.mlp_block_unfused(x, residual, w)
        rows, hidden = x.shape
        inner = down.shape.in_features
        scratch = torch.empty(rows * (hidden + 3 * inner))
        library.mlp_block(
            *(x.data_ptr(), residual.data_ptr(), w["mlp_norm"].data_ptr(), self.shape.eps),
            *(gate_up.tensors[0].data_ptr(), kinds[0], native.pointer(w.get("gate_up_bias"))),
            *(down.tensors[0].data_ptr(), kinds[1], native.pointer(w.get("down_bias"))),
            *(rows, hidden, inner, scratch.data_ptr()),
        )
        return x, residual

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, self.shape.eps)

    def attention_block_unfused(self, x: Tensor, residual: Tensor, w: LayerWeights, kv_layer: Tensor,
                                batch: AttentionBatch, window: int | None, layer: int) -> tuple[Tensor, Tensor]:
        """Compute `attention_block` operation by operation: for any format, and with an offloaded prefix."""
        x, residual = add_rms_norm(x, residual, w["input_norm"], self.shape.eps)
        return self.attend(x, w, kv_layer, batch, window, layer), residual

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.shape.eps)

    def attend(self, x: Tensor, w: LayerWeights, kv_layer: Tensor, batch: AttentionBatch, window: int | None,
               layer: int) -> Tensor:
        q = self._project_and_store(x, w, kv_layer, batch)
        out = attention(q, kv_layer, batch, self.shape.scale, window, w.get("sinks"), layer)
        return linear(out.view(len(x), -1), w["o"], w.get("o_bias"))

    def store(self, x: Tensor, w: LayerWeights, kv_layer: Tensor, batch: AttentionBatch) -> None:
        self._project_and_store(x, w, kv_layer, batch)

    def _project_and_store(self, x: Tensor, w: LayerWeights, kv_layer: Tensor, batch: AttentionBatch) -> Tensor:
        """Store the keys and values of x [T, any width]; return its queries [T, heads, head_dim]."""
        rows, shape = x.shape[0], self.shape
        product = linear(x, w["qkv"], w.get("qkv_bias")).view(rows, -1, shape.head_dim)
        counts = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        q, k, v = product.split_with_sizes(counts, dim=1)  # [T, heads, head_dim]
        if "q_norm" in w:
            q, k = rms_norm(q, w["q_norm"], shape.eps), rms_norm(k, w["k_norm"], shape.eps)
        q, k = rope(q, k, self.cos, self.sin, batch.positions)
        store_kv(k, v, kv_layer, batch)
        return q

    def mlp_block_unfused(self, x: Tensor, residual: Tensor, w: LayerWeights) -> tuple[Tensor, Tensor]:
        """Compute `mlp_block` operation by operation, for any format."""
        x, residual = add_rms_norm(x, residual, w["mlp_norm"], self.shape.eps)
        inner = silu_and_mul(linear(x, w["gate_up"], w.get("gate_up_bias")))
        return linear(inner, w["down"], w.get("down_bias")), residual

    def rows_before(self, x: Tensor, kept: KeptRows, batch: AttentionBatch, slots: Tensor, follows: Tensor) -> Tensor:
        return rows_before(x, kept, batch, slots, follows)

    def keep_rows(self, x: Tensor, kept: KeptRows, batch: AttentionBatch, slots: Tensor) -> None:
        keep_rows(x, kept, batch, slots)


class LayerStack:
    """Layers whose weights and KV stay at their addresses, run by one native call."""

    def __init__(self, shape: LayerShape, cos: Tensor, sin: Tensor, layers: Sequence[LayerWeights],
                 kv_layers: Sequence[tuple[Tensor, int]], windows: Sequence[int | None],
                 routing: Routing | None = None) -> None:
        """Bind all layers. `layers`: the weights of each, as for `CpuKernels`; `kv_layers`: the KV of each, and the
        index of its layer group, which selects its batch; `routing`: of layers that are mixtures."""
        self._shape, self._cos, self._sin = shape, cos, sin
        self._limit = (routing.limit if routing is not None else None) or 0.0
        mlps = [_mlp(w, routing) for w in layers]
        self._records = torch.tensor([
            [native.pointer(w["input_norm"]), *_matrix(w["qkv"], w.get("qkv_bias")), native.pointer(w.get("q_norm")),
             native.pointer(w.get("k_norm")), native.pointer(w.get("sinks")), *_matrix(w["o"], w.get("o_bias")),
             native.pointer(w["mlp_norm"]), *mlp.gate_up, *mlp.down, kv.data_ptr(), group, window or 0, *mlp.record]
            for w, mlp, (kv, group), window in zip(layers, mlps, kv_layers, windows, strict=True)
        ], dtype=torch.int64)
        self._kv = kv_layers[0][0]
        self._normed = "q_norm" in layers[0]
        hidden = layers[0]["o"].shape.out_features
        self._row_floats = max(mlp.row_floats(hidden) for mlp in mlps)
        self._expert_floats = max(mlp.expert_floats(hidden) for mlp in mlps)

    @staticmethod
    def serves(layers: Sequence[LayerWeights]) -> bool:
        """Return whether all matrices are in a format that the native kernels multiply with, and all experts
        resident."""
        return all(matrix is not None and matrix.format.panel_kind is not None
                   for w in layers for matrix in (w["qkv"], w["o"], *_mlp_matrices(w)))

    def run(self, x: Tensor, residual: Tensor, batches: Sequence[AttentionBatch],
            on_layers: Callable[[], None], taps: Sequence[tuple[int, Tensor]] = ()) -> bool:
        """Run the layers, or return False and do nothing if the native kernels do not apply to this step.

        x and residual are overwritten with the results of the last `mlp_block`. `batches`: one per layer group;
        `on_layers`: called before the layers run; `taps`: (layer, tensor for its input sum), each one more native call.
        """
        library, shape, first = native.fused(), self._shape, batches[0]
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        stride = native_block_stride(self._kv, x, kv_heads, dim, first)
        if library is None or stride is None or any(batch.offloaded is not None for batch in batches):
            return False
        rows, hidden = x.shape
        if 4 * rows * self._expert_floats > EXPERT_SCRATCH_BYTES:
            return False
        width = (3 if self._normed else 2) * (heads + kv_heads) * dim
        scratch = torch.empty(rows * (hidden + max(width, self._row_floats)))
        places = torch.tensor([[batch.positions.data_ptr(), batch.rows.data_ptr(), *batch.query_arguments]
                               for batch in batches], dtype=torch.int64)
        arguments = (
            *(places.data_ptr(), x.data_ptr(), residual.data_ptr()),
            *(shape.eps, self._cos.data_ptr(), self._sin.data_ptr(), stride, shape.scale, rows, hidden),
            *(heads, kv_heads, dim, first.block_size, POOL_KINDS[first.kv_dtype], self._limit, scratch.data_ptr()),
        )
        on_layers()
        first_layer = 0
        for layer, total in (*sorted(taps, key=lambda tap: tap[0]), (len(self._records), None)):
            if layer > first_layer:
                library.decoder_layers(self._records[first_layer].data_ptr(), layer - first_layer, *arguments)
                first_layer = layer
            if total is not None:
                torch.add(x, residual, out=total)
        return True


@dataclass(frozen=True)
class _Mlp:
    """The fields of a layer's MLP in the records of native/block.cpp."""

    gate_up: tuple[int, int, int]  # of the first expert in a mixture
    down: tuple[int, int, int]
    inner: int
    router: tuple[int, int, int] = (0, 0, 0)  # this and what follows: zeros in a dense layer
    strides: tuple[int, int, int, int] = (0, 0, 0, 0)  # from an expert to the next: of gate_up, its bias, and of down
    experts: int = 0
    k: int = 0
    renormalize: int = 0

    @property
    def record(self) -> tuple[int, ...]:
        """Return the fields after those of the KV."""
        return (self.inner, *self.router, *self.strides, self.experts, self.k, self.renormalize)

    def expert_floats(self, hidden: int) -> int:
        """Return the floats that a row takes to compute its experts; 0 in a dense layer."""
        return self.k * (2 * hidden + 3 * self.inner)

    def row_floats(self, hidden: int) -> int:
        """Return the floats that a row takes besides its normed input."""
        return self.expert_floats(hidden) + 3 * self.k + self.experts if self.k else 3 * self.inner


def _mlp(w: LayerWeights, routing: Routing | None) -> _Mlp:
    if "router" not in w:
        return _Mlp(_matrix(w["gate_up"], w.get("gate_up_bias")), _matrix(w["down"], w.get("down_bias")),
                    w["down"].shape.in_features)
    experts = w["experts"]
    assert isinstance(experts, ResidentExperts)
    assert routing is not None
    first, second = experts.first, experts.second
    return _Mlp(_matrix(first.weight, first.bias), _matrix(second.weight, second.bias), second.width,
                _matrix(w["router"], w.get("router_bias")),
                (first.stride, first.bias_stride, second.stride, second.bias_stride), first.count, routing.k,
                int(routing.renormalize))


def _mlp_matrices(w: LayerWeights) -> tuple[Linear | None, ...]:
    """Return the matrices of a layer's MLP; None for those of experts that are not all resident."""
    if "router" not in w:
        return w["gate_up"], w["down"]
    experts = w["experts"]
    if not isinstance(experts, ResidentExperts):
        return (None,)
    return w["router"], experts.first.weight, experts.second.weight


def _matrix(w: Linear, bias: Tensor | None) -> tuple[int, int, int]:
    """Return the address of a linear's panels, their kind, and the address of its bias (0: none)."""
    assert w.format.panel_kind is not None
    return w.tensors[0].data_ptr(), w.format.panel_kind, native.pointer(bias)
