"""Quantising with calibration: the model's layers run over a text, one layer at a time, and each layer is quantised
such that its outputs on that text change little."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from spillover.errors import SpilloverError
from spillover.kernels.batch import AttentionBatch
from spillover.kernels.cpu_kernels import CpuKernels
from spillover.kernels.fields import Field, LinearShape
from spillover.kernels.formats.base import Linear, Weight, WeightFormat
from spillover.kernels.linear import embedding
from spillover.kernels.moe.experts import Experts, expert_stacks
from spillover.kernels.moe.moe import LocalExperts, expert_mlp, moe, route
from spillover.kernels.quantize import InputStats, Quantized
from spillover.models.checkpoint import Checkpoint
from spillover.models.config import ModelConfig
from spillover.models.loader import PartReader
from spillover.models.quantize.scheme import Scheme
from spillover.models.quantize.view import matrix_names
from spillover.models.registry import Architecture
from spillover.models.weight_specs import WeightSpec, WeightSpecs, layer_part
from spillover.models.weights import PartWeights
from spillover.units import format_bytes

BLOCK_SIZE = 16  # tokens per KV block
STEP_TOKENS = 2048  # tokens computed by a layer at a time
SUM_ROWS = 256  # rows of a sum of inputs that are added at a time, from the diagonal on
LAST = ("down", "experts.down")  # linears whose outputs no other linear of the layer reads


@dataclass(frozen=True, eq=False)
class Observed(WeightFormat):
    """A dense format that also accumulates the sum of xT x over the inputs x of each matrix."""

    sums: dict[int, Tensor] = field(default_factory=dict)  # sum by the address of the matrix; its upper triangle alone
    multiplies: bool = True  # False: outputs are zeros, as they are not read
    quant_method = "observed"

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        return (Field("weight", dtype, (shape.out_features, shape.in_features)),)

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        return w.tensors[0]

    def linear(self, x: Tensor, w: Linear, bias: Tensor | None = None) -> Tensor:
        matrix, width = w.tensors[0], x.shape[1]
        total = self.sums.get(matrix.data_ptr())
        if total is None:
            total = self.sums[matrix.data_ptr()] = torch.zeros(width, width, device=x.device)
        for start in range(0, width, SUM_ROWS):
            total[start : start + SUM_ROWS, start:].addmm_(x[:, start : start + SUM_ROWS].T, x[:, start:])
        return F.linear(x, matrix, bias) if self.multiplies else x.new_zeros(len(x), len(matrix))


class Calibration:
    """A quantiser that makes the codes of every matrix, layer by layer, as they are requested."""

    def __init__(self, checkpoint: Checkpoint, arch: Architecture, config: ModelConfig, specs: WeightSpecs,
                 scheme: Scheme, tokens: Tensor, device: torch.device) -> None:
        """Prepare the first layer's inputs. `tokens` [sequences, length]; `specs`: of the unquantised model."""
        self._specs, self._scheme, self._config, self._device = specs, scheme, config, device
        self._model = arch.build(config, device, torch.float32, tokens.shape[1])
        self._model.kernels = CpuKernels(self._model.shape, self._model.cos, self._model.sin)  # work on any device
        self._reader = PartReader(checkpoint, config, specs, torch.float32)
        self._count, self._length = tokens.shape
        table = cast(Linear, self._reader.part("embed", lambda name: True)["embedding"])
        self._residual = embedding(tokens.flatten(), table)  # [tokens, hidden], on the host
        self._x = torch.zeros_like(self._residual)
        self._layer = 0
        self._codes: dict[str, Quantized] = {}  # codes of the layer quantised last, by name

    def quantized(self, name: str) -> Quantized:
        """Return the codes of a matrix, by its name in the checkpoint; layers must be requested in order."""
        while name not in self._codes:
            self._quantize_layer()
        return self._codes.pop(name)

    def _quantize_layer(self) -> None:
        part = layer_part(self._layer)
        weights = {name: _moved(weight, self._device) for name, weight in
                   self._reader.part(part, lambda name: True).items()}
        specs = {spec.name: spec for spec in self._specs[part] if matrix_names(spec)}
        observed = Observed()
        last = replace(observed, multiplies=False)
        for _ in self._outputs({name: replace(weight, format=last if name in LAST else observed)
                                if name in specs and isinstance(weight, Linear) else weight
                                for name, weight in weights.items()}):
            pass
        self._codes = {}
        for name, spec in specs.items():
            self._quantize_linear(spec, cast(Linear, weights[name]), observed)
        for rows, x, residual in self._outputs(weights):  # outputs of the quantised layer: the next one's inputs
            self._x[rows], self._residual[rows] = x, residual
        self._layer += 1

    def _quantize_linear(self, spec: WeightSpec, weight: Linear, observed: Observed) -> None:
        """Quantise a linear, or each expert of a stack, and replace its weights by the dequantised codes."""
        names = iter(matrix_names(spec))
        for expert in range(spec.experts) if spec.experts else (None,):
            matrix = weight.tensors[0] if expert is None else weight.tensors[0][expert]
            total = observed.sums.pop(matrix.data_ptr(), None)
            stats = None if total is None else InputStats.of(total)
            for rows in matrix.split_with_sizes(spec.sources[0].rows):
                name = next(names)
                if self._scheme.ignores(name.removesuffix(".weight")):
                    continue
                made = self._scheme.round(rows) if stats is None else self._scheme.gptq_round(rows, stats)
                rows.copy_(made.dequantize(torch.float32))
                self._codes[name] = made

    def _outputs(self, weights: Mapping[str, Weight]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Run the layer over all tokens, a few sequences at a time; yield their rows, x and residual."""
        model, config, layer = self._model, self._config, self._layer
        part = cast(PartWeights, dict(weights))
        if "experts.down" in weights:
            part["experts"] = _EachExpert(*expert_stacks(part))
        step = max(1, STEP_TOKENS // self._length)
        blocks = -(-self._length // BLOCK_SIZE)
        kv = torch.empty(step * blocks + 1, 2, config.num_kv_heads, BLOCK_SIZE * config.head_dim, device=self._device)
        for first in range(0, self._count, step):
            count = min(step, self._count - first)
            rows = slice(first * self._length, (first + count) * self._length)
            x, residual = (state[rows].to(self._device, copy=True) for state in (self._x, self._residual))
            batch = whole_sequences(count, self._length, self._device)
            x, residual = model.kernels.attention_block(x, residual, part, kv, batch, config.windows[layer], layer)
            yield rows, *model.mlp(layer, x, residual, part)


@dataclass(frozen=True)
class _EachExpert:
    """The experts of a layer, computed one after another on any device."""

    first: Experts
    second: Experts

    def mixture(self, x: Tensor, scores: Tensor, k: int, renormalize: bool, limit: float | None,
                local: LocalExperts | None = None) -> Tensor:
        ids, shares = route(scores, k, renormalize, limit, local)
        return moe(x, ids, shares, lambda index, rows: expert_mlp(rows, self.first, self.second, index, limit))


def calibration_bytes(specs: WeightSpecs, config: ModelConfig) -> tuple[int, int]:
    """Return (fixed bytes, bytes per token). Fixed are one layer in float32 and the sums of its inputs."""
    def layer_bytes(listed: list[WeightSpec]) -> int:
        linears = [spec for spec in listed if matrix_names(spec)]
        weights = sum(spec.nbytes("float32") for spec in listed)
        largest = max((spec.shape[-1] for spec in linears), default=0)
        sums = sum(max(1, spec.experts) * spec.shape[-1] ** 2 * 4 for spec in linears)
        return 2 * weights + sums + 4 * 8 * largest**2  # the sums are factored in float64

    fixed = max(layer_bytes(listed) for part, listed in specs.items() if part.startswith("layers."))
    embed = sum(spec.nbytes("float32") for spec in specs["embed"])
    run = STEP_TOKENS * 4 * (4 * config.hidden_size + 4 * max(config.intermediate_size, config.hidden_size))
    return max(fixed + run, embed), 2 * 4 * config.hidden_size


def fit_tokens(tokens: Tensor, specs: WeightSpecs, config: ModelConfig, budget: int) -> Tensor:
    """Return the first of the sequences [n, length], at most as many as fit in a memory budget."""
    fixed, each = calibration_bytes(specs, config)
    count = (budget - fixed) // (each * tokens.shape[1])
    if count < 1:
        raise SpilloverError(f"calibration needs {format_bytes(fixed + each * tokens.shape[1])} of host memory at "
                             f"least, and there are {format_bytes(budget)}; raise --host-memory or leave out "
                             "--calibrate")
    return tokens[:count]


def whole_sequences(count: int, length: int, device: torch.device) -> AttentionBatch:
    """Return the attention batch of `count` sequences of `length` tokens without cached tokens."""
    blocks = -(-length // BLOCK_SIZE)
    numbers: Any = {"dtype": torch.int32, "device": device}
    return AttentionBatch(
        query_start=torch.arange(0, (count + 1) * length, length, **numbers),
        seq_lens=torch.full((count,), length, **numbers),
        block_table=torch.arange(1, count * blocks + 1, **numbers).view(count, blocks),
        positions=torch.arange(length, device=device).repeat(count),
        rows=torch.arange(count, **numbers).repeat_interleave(length),
        block_size=BLOCK_SIZE,
    )


def _moved(weight: Weight, device: torch.device) -> Weight:
    return weight.map(lambda tensor: tensor.to(device)) if isinstance(weight, Linear) else weight.to(device)
