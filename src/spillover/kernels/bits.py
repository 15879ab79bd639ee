"""Checks on this machine that a row has the same bits whatever the other rows of its batch, which is guaranteed on a
GPU without `--fast`, and on a CPU always.

Runs each kernel with random weights in the shapes of a small model's layer, at the numbers of rows in FEW and MORE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from spillover.kernels import native
from spillover.kernels.batch import AttentionBatch, LayerShape, LayerWeights
from spillover.kernels.fields import LinearShape
from spillover.kernels.formats.base import Linear, Target, WeightFormat
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.formats.fp8_block import FP8_BLOCK
from spillover.kernels.formats.mxfp4 import MXFP4
from spillover.kernels.kv_quant import head_bytes
from spillover.kernels.layer_kernels import kernels_on
from spillover.kernels.linear import linear
from spillover.kernels.moe.experts import Experts
from spillover.kernels.moe.moe import mixture

FEW = tuple(range(1, 65))
MORE = {"cpu": (65, 100, 128, 200, 256), "cuda": (65, 100, 127, 128, 129, 200, 256, 257, 512, 1000, 2048, 4096, 8192)}
LONGEST = {"cpu": 600, "cuda": 9000}  # tokens of the sequence whose chunks are compared
HIDDEN, INNER, VOCAB, BLOCK = 1024, 3072, 8192, 16
SHAPE = LayerShape(num_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5, eps=1e-6)
EXPERTS, EXPERT_INNER, TOP_K, SWIGLU_LIMIT = 16, 768, 4, 7.0
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class BitsCheck:
    """The result of one kernel: the numbers of rows that were compared with the largest, and the first that differs."""

    kernel: str
    rows: tuple[int, ...]
    differs: int | None  # first number of rows whose bits differ; None if none do


@dataclass(frozen=True)
class _Case:
    kernel: str
    rows: tuple[int, ...]
    differences: Iterable[bool]  # whether bits differ, for each of `rows`


def check_bits(device: str, progress: Progress | None = None) -> list[BitsCheck]:
    """Compare every kernel at every number of rows; skip to the next kernel at the first number that differs."""
    with torch.inference_mode():
        cases = list(_cases(torch.device(device)))
        done, checks = 0, []
        for case in cases:
            differs = None
            for count, different in zip(case.rows, case.differences, strict=True):
                done += 1
                if progress is not None:
                    progress(done, sum(len(each.rows) for each in cases))
                if different:
                    differs = count
                    break
            checks.append(BitsCheck(case.kernel, case.rows, differs))
    return checks


def _cases(device: torch.device) -> Iterator[_Case]:
    maker = _Maker(device)
    counts = (*FEW, *MORE[device.type])
    sizes = {"qkv": (4096, HIDDEN), "o": (HIDDEN, 2048), "down": (HIDDEN, INNER), "head": (VOCAB, HIDDEN)}
    for name, (channels, inner) in sizes.items():
        w = maker.linear(maker.format, channels, inner)
        x = maker.normal(counts[-1], inner)
        yield _Case(f"product {name} {channels} x {inner}", counts, _differences(partial(linear, w=w), x, counts))
    layer = maker.layer()
    residual = maker.normal(counts[-1], HIDDEN)

    def mlp(x: Tensor) -> Tensor:
        return torch.cat(maker.kernels.mlp_block(x.clone(), residual[:len(x)].clone(), layer), dim=1)

    same = maker.normal(1, HIDDEN).expand(counts[-1], -1)  # equal rows, which differ in their residual alone
    yield _Case("norm and MLP", counts, _differences(mlp, same, counts, ends=False))
    for kv_dtype in ("auto", "fp8", "int8"):
        name = "norm, QKV, rotary embedding, attention" + (f" over {kv_dtype} KV" if kv_dtype != "auto" else "")
        yield _Case(name, counts, _chunk_differences(maker, layer, counts, kv_dtype))
    for name, weight_format in maker.expert_formats.items():
        first = Experts(maker.linear(weight_format, 2 * EXPERT_INNER, HIDDEN, EXPERTS, parts=2))
        second = Experts(maker.linear(weight_format, HIDDEN, EXPERT_INNER, EXPERTS))
        scores = maker.normal(counts[-1], EXPERTS)
        # MXFP4 experts use float16 activations: only gpt-oss has them, and it clamps values that would not fit.
        limit = SWIGLU_LIMIT if name == "MXFP4" else None

        def mix(both: Tensor, first: Experts = first, second: Experts = second, limit: float | None = limit) -> Tensor:
            x, scores = both[:, :HIDDEN].contiguous(), both[:, HIDDEN:].contiguous()
            return mixture(x, scores, first, second, TOP_K, True, limit)

        x = torch.cat((maker.normal(counts[-1], HIDDEN), scores), dim=1)
        yield _Case(f"mixture of experts, {name}", counts, _differences(mix, x, counts))


def _differences(run: Callable[[Tensor], Tensor], x: Tensor, counts: tuple[int, ...],
                 ends: bool = True) -> Iterator[bool]:
    """Yield for each number of rows whether the first, or with `ends` the last, differ from the same rows of all."""
    whole = run(x)
    assert whole.isfinite().all(), "NaN differs from itself: the case must be one that a kernel can compute"
    for count in counts:
        parts = [slice(0, count), slice(len(x) - count, len(x))] if ends else [slice(0, count)]
        yield any(not torch.equal(run(x[rows]), whole[rows]) for rows in parts)


def _chunk_differences(maker: _Maker, layer: LayerWeights, counts: tuple[int, ...], kv_dtype: str) -> Iterator[bool]:
    """Yield for each number of rows whether chunks of that size differ from the sequence computed in one chunk."""
    length = LONGEST[maker.device.type]
    x, residual = maker.normal(length, HIDDEN), maker.normal(length, HIDDEN)
    blocks = -(-length // BLOCK)
    size, dtype = BLOCK * SHAPE.head_dim, maker.dtype
    if kv_dtype != "auto":
        size, dtype = head_bytes(BLOCK, SHAPE.head_dim), torch.uint8
    pool = torch.zeros(blocks + 1, 2, SHAPE.num_kv_heads, size, dtype=dtype, device=maker.device)
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).int()[None] + 1

    def run(first: int, last: int) -> Tensor:
        batch = maker.chunk(first, last, table, kv_dtype)
        out, total = maker.kernels.attention_block(x[first:last].clone(), residual[first:last].clone(), layer, pool,
                                                   batch, None, 0)
        return torch.cat((out, total), dim=1)

    whole = run(0, length)
    for count in counts:
        starts = (length - count, (length - count) // 2, 0)
        yield any(not torch.equal(run(start, start + count), whole[start:start + count]) for start in starts)


class _Maker:
    """Random weights, activations and batches on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        width = native.panel_width() if device.type == "cpu" and native.library() is not None else 0
        self.format: WeightFormat = DENSE.batch_invariant() if device.type == "cuda" else (
            DENSE.packed(width, LinearShape((width,), width)) if width else DENSE)
        self.expert_formats = {"dense": self.format} if device.type == "cpu" else {
            "bfloat16": self.format, "FP8": FP8_BLOCK.batch_invariant(), "MXFP4": MXFP4.batch_invariant()}
        self._random = torch.Generator(device).manual_seed(0)
        angles = torch.outer(torch.arange(LONGEST[device.type], device=device).float(),
                             10000 ** -torch.arange(0, 1, 2 / SHAPE.head_dim, device=device))
        self.kernels = kernels_on(device, SHAPE, angles.cos().contiguous(), angles.sin().contiguous())

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random, device=self.device).to(self.dtype)

    def linear(self, weight_format: WeightFormat, channels: int, inner: int, experts: int = 0,
               parts: int = 1) -> Linear:
        shape = LinearShape((channels // parts,) * parts, inner)
        target = Target(str(self.dtype).removeprefix("torch."), self.device)
        return Linear(weight_format, shape, weight_format.dummy(shape, experts, target, self._random))

    def layer(self) -> LayerWeights:
        heads, dim = SHAPE.num_heads, SHAPE.head_dim
        return {
            "input_norm": self.normal(HIDDEN), "qkv": self.linear(self.format, 4096, HIDDEN),
            "q_norm": self.normal(dim), "k_norm": self.normal(dim), "o": self.linear(self.format, HIDDEN, heads * dim),
            "mlp_norm": self.normal(HIDDEN), "gate_up": self.linear(self.format, 2 * INNER, HIDDEN, parts=2),
            "down": self.linear(self.format, HIDDEN, INNER),
        }

    def chunk(self, first: int, last: int, table: Tensor, kv_dtype: str) -> AttentionBatch:
        """Return the batch of one sequence's rows from `first` to `last`."""
        count = last - first
        batch = AttentionBatch(
            query_start=torch.tensor([0, count], dtype=torch.int32, device=self.device),
            seq_lens=torch.tensor([last], dtype=torch.int32, device=self.device), block_table=table.to(self.device),
            positions=torch.arange(first, last, device=self.device),
            rows=torch.zeros(count, dtype=torch.int32, device=self.device), block_size=BLOCK,
            kv_dtype=kv_dtype)
        if self.device.type == "cpu":
            return batch
        from spillover.kernels.triton.attention.attention import make_work

        return replace(batch, work=make_work(batch, SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.head_dim, None))
