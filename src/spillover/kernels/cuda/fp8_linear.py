"""Products of FP8 weights and activations, in CUDA C++ for compute capability 9.0 (fp8_few.cu, fp8_linear.cu; rows are
rounded by fp8_round.cu).

Activations are rounded to e4m3 first: a row by its largest magnitude, or by a scale of the checkpoint, or, for weights
in blocks, each 128 inputs of a row by their largest magnitude. Sums have the same order for every number of rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from spillover.kernels.cuda.driver.compiled import Module, compile_ahead, module_or_none
from spillover.kernels.cuda.driver.tensor_map import BYTES, TYPES, Map, capable, processors, sums_options, tensor_map

FEW_SOURCE, SOURCE, ROUND_SOURCE = (
    Path(__file__).parent / name for name in ("fp8_few.cu", "fp8_linear.cu", "fp8_round.cu"))
STEP = 128  # inputs of a step
UNIT = 64  # channels or rows that a warpgroup multiplies
CHUNKS = 4  # number of chunks of the inputs
SHORTEST = 2  # minimum number of steps of a chunk
ROUNDERS = 512  # maximum number of threads that round a row
SHARED = 226 << 10  # bytes of a multiprocessor's shared memory
OWN_SHARED = 1 << 10  # bytes of shared memory that a block takes besides what it requests
OWN_ROWS = {False: 1, True: 2}  # by `blocked`: maximum number of rows of x that each block rounds itself
FEW_ROWS = 64  # maximum number of rows for which weights are the left operand
FILLED = 132  # number of multiprocessors to keep busy with one block each
ROWS_AT_ONCE = 4096  # rows that are rounded and multiplied at a time
IN_FLIGHT = 96 << 10  # bytes of weights in flight to a multiprocessor
MOST_STAGES = 16
SMALL = 256  # maximum number of rows whose tiles are so narrow that they fill all multiprocessors in one or a few waves
MOST_WAVES = 4
LEAST_CHANNELS = 32
LEAD = 900  # clock cycles by which the second warpgroup of a block begins later: the time of about one step
MOST_CHANNELS = {False: 224, True: 128}  # by `blocked`: maximum channels of a tile, whose sums fit into registers
MOST_PREPARED = 2048  # rows; products of more rows have the same cuts
MOST_NORMED = 8192  # maximum number of inputs of a row that a block can norm
NORM_BYTES = 3 * 32 * 4  # bytes of shared memory to combine parts of sums of squares, and largest magnitudes


class KernelConfig(NamedTuple):
    """The properties that kernels are compiled for besides a cut."""

    blocked: bool  # whether scales are those of 128 x 128 weights, and of 128 inputs
    gated: bool
    chunks: int
    normed: int = 0  # inputs of a row if rows are added to a residual and normed first, else 0


class Shape(NamedTuple):
    """The matrix of a product, and how it is stored and used."""

    channels: int
    inner: int
    blocked: bool
    gated: bool = False
    normed: bool = False  # whether the product first adds rows to a residual and norms them

    @property
    def steps(self) -> int:
        return self.inner // STEP

    @property
    def chunks(self) -> int:
        """Return the number of chunks of the inputs: a constant of the matrix, as another number would change the
        bits of every product."""
        return CHUNKS if self.steps >= CHUNKS * SHORTEST else 1

    @property
    def chunk(self) -> int:
        """Return the number of steps of a chunk."""
        return -(-self.steps // self.chunks)

    @property
    def config(self) -> KernelConfig:
        return KernelConfig(self.blocked, self.gated, self.chunks, self.inner if self.normed else 0)

    @property
    def rounding(self) -> tuple[Rounding, KernelConfig]:
        """Return the kernel and config that round rows before the product, and norm them first if `normed`."""
        return Rounding(self.inner), KernelConfig(self.blocked, False, 1, self.inner if self.normed else 0)

    @property
    def stored(self) -> int:
        """Return the number of channels of the result."""
        return self.channels // 2 if self.gated else self.channels


class FewCut(NamedTuple):
    """The cut of a product of up to FEW_ROWS rows, in the terms of fp8_few.cu."""

    rows: int  # rows of a tile
    groups: int = 1  # warpgroups that multiply
    spread: bool = False  # whether the chunks of a tile are spread over a cluster of blocks
    rounds_rows: bool = False  # whether blocks round rows themselves
    resident: int = 1  # blocks per multiprocessor

    @property
    def source(self) -> Path:
        return FEW_SOURCE

    @property
    def threads(self) -> int:
        return 128 * self.groups + 32

    def tiles(self, rows: int, shape: Shape) -> int:
        return -(-rows // self.rows) * -(-shape.channels // (UNIT * self.groups))

    def blocks(self, rows: int, shape: Shape, processors: int) -> int:
        """Return the number of blocks of a launch: one per chunk of each tile, or at most as many as run at a time."""
        tiles = self.tiles(rows, shape)
        return tiles * shape.chunks if self.spread else min(tiles, processors * self.resident)

    def stage_bytes(self, shape: Shape) -> int:
        """Return the bytes of a stage, with its barriers and scales."""
        x = 0 if self.rounds_rows else self.rows * STEP + (self.rows * 4 if shape.blocked else 0)
        return self.groups * UNIT * STEP + x + 16

    def fixed_bytes(self, shape: Shape) -> int:
        """Return the bytes besides stages: rows that a block rounds, their scales, those of weights, and a norm's."""
        steps = shape.chunk if self.spread else shape.steps
        row_bytes = self.rows * (STEP * steps + 4 * (steps if shape.blocked else 2)) if self.rounds_rows else 0
        return row_bytes + (self.groups * 2 * steps * 4 if shape.blocked else 0) + (NORM_BYTES if shape.normed else 0)

    def stages(self, shape: Shape, blocks: int, processors: int) -> int:
        """Return the number of stages that fit; with own rows, only as many as keep the memory busy, so that blocks of
        the next kernel fit before this one has completed."""
        most = (SHARED // self.resident - OWN_SHARED - self.fixed_bytes(shape)) // self.stage_bytes(shape)
        if self.rounds_rows:
            concurrent = min(self.resident, -(-blocks // processors))
            most = min(most, max(4, -(-IN_FLIGHT // (concurrent * self.groups * UNIT * STEP))))
        return min(most, shape.chunk if self.spread else MOST_STAGES)

    def shared(self, shape: Shape, stages: int) -> int:
        """Return the bytes of shared memory of a block: at least a tile's sums if a cluster adds them up there."""
        sums = self.rows * self.groups * UNIT * 4 if self.spread else 0
        return max(sums, stages * self.stage_bytes(shape) + self.fixed_bytes(shape))

    def fits(self, shape: Shape) -> bool:
        return self.stages(shape, 1, 1) >= min(3, shape.chunk) and (not self.spread or shape.chunks > 1)

    def norms(self, shape: Shape) -> bool:
        """Return whether the product adds rows to a residual and norms them itself. In a cluster every block would norm
        whole rows, which takes longer than a separate kernel."""
        return self.rounds_rows and not self.spread and shape.inner <= MOST_NORMED

    def weights_map(self, values: Tensor, shape: Shape) -> ctypes.Array[ctypes.c_uint64]:
        """Return the tensor map of weights [channels / 16][2][8][inputs]; with a gate, the 2 are its two matrices."""
        inner = shape.inner
        strides = (shape.stored * inner, 8 * inner) if shape.gated else (8 * inner, 16 * inner)
        return tensor_map(values.data_ptr(), BYTES, (inner, 8, 2, shape.channels // 16), (inner, *strides),
                          (STEP, 8, 2, 4 * self.groups))

    def options(self, config: KernelConfig, dtype: torch.dtype) -> tuple[str, ...]:
        return _options(config, dtype, self.rows, ROWS=self.rows, GROUPS=self.groups, CHUNKS=config.chunks,
                        CLUSTER=config.chunks if self.spread else 1, OWN_X=int(self.rounds_rows),
                        RESIDENT=self.resident, NORMED=config.normed)


class Rounding(NamedTuple):
    """The kernel that rounds rows of x if blocks do not round them themselves, in the terms of fp8_round.cu."""

    inner: int  # inputs of a row

    @property
    def source(self) -> Path:
        return ROUND_SOURCE

    @property
    def threads(self) -> int:
        return min(-(-self.inner // 256) * 32, ROUNDERS)

    def options(self, config: KernelConfig, dtype: torch.dtype) -> tuple[str, ...]:
        return _defined(config, dtype, INPUTS=self.inner, NORMED=int(config.normed > 0), ROUNDERS=self.threads)


class Cut(NamedTuple):
    """The tiles of a product of more rows, in the terms of fp8_linear.cu; with a gate, half of the channels are of each
    matrix."""

    channels: int  # channels of a tile
    groups: int = 2  # warpgroups that multiply

    @property
    def source(self) -> Path:
        return SOURCE

    @property
    def rows(self) -> int:
        return UNIT * self.groups

    @property
    def threads(self) -> int:
        """Return the threads of a block; with several groups a whole warpgroup copies, to give up its registers."""
        return 128 * self.groups + (128 if self.groups > 1 else 32)

    def tiles(self, rows: int, shape: Shape) -> int:
        return -(-rows // self.rows) * -(-shape.channels // self.channels)

    def blocks(self, rows: int, shape: Shape, processors: int) -> int:
        return min(self.tiles(rows, shape), processors)

    def stage_bytes(self, shape: Shape) -> int:
        """Return the bytes of a stage, with its barriers and scales."""
        return (self.channels + self.rows) * STEP + (self.rows * 4 if shape.blocked else 0) + 16

    def fixed_bytes(self, shape: Shape) -> int:
        """Return the bytes besides stages: totals of chunks if `blocked`, else scales of weights."""
        return self.channels * 4 * (self.rows if shape.blocked else self.groups)

    def stages(self, shape: Shape, blocks: int, processors: int) -> int:
        """Return the number of stages that fit."""
        return min((SHARED - self.fixed_bytes(shape)) // self.stage_bytes(shape), MOST_STAGES)

    def shared(self, shape: Shape, stages: int) -> int:
        return stages * self.stage_bytes(shape) + self.fixed_bytes(shape)

    def fits(self, shape: Shape) -> bool:
        return self.stages(shape, 1, 1) >= 3

    def norms(self, shape: Shape) -> bool:
        return False

    def clocks(self, rows: int, shape: Shape, processors: int) -> float:
        """Estimate the clock cycles of the multiprocessor with most tiles: a step of 32 inputs is bound by the tensor
        cores, by shared memory or by the cache, from which x is read again for each tile."""
        box, multiply = min(rows, self.rows), self.groups * self.channels / 2
        share = self.groups * (16 + self.channels / 4) + (box + self.channels) / 4
        step = max(multiply, share, 0.46 * box + 0.82 * self.channels) + (box + self.channels) / 16
        tile = shape.inner / 32 * step + 20 * multiply + 2800
        return -(-self.tiles(rows, shape) // processors) * tile

    def weights_map(self, values: Tensor, shape: Shape) -> ctypes.Array[ctypes.c_uint64]:
        box = self.channels // 2 if shape.gated else self.channels
        return tensor_map(values.data_ptr(), BYTES, (shape.inner, shape.channels), (shape.inner,),
                          (STEP, min(box, shape.stored)))

    def options(self, config: KernelConfig, dtype: torch.dtype) -> tuple[str, ...]:
        return _options(config, dtype, self.channels, CHANNELS=self.channels, GROUPS=self.groups, LEAD=LEAD)


def _options(config: KernelConfig, dtype: torch.dtype, width: int, **more: int) -> tuple[str, ...]:
    return _defined(config, dtype, GATED=int(config.gated), **more, **sums_options(width))


def _defined(config: KernelConfig, dtype: torch.dtype, **more: object) -> tuple[str, ...]:
    defined = {"BLOCKED": int(config.blocked), "X_BF16": int(dtype is torch.bfloat16), **more}
    return tuple(f"-D{name}={value}" for name, value in defined.items())


def few_cuts(rows: int, shape: Shape, processors: int) -> tuple[FewCut, ...]:
    """Return the cuts of a product of up to FEW_ROWS rows, the preferred ones first, by measurements on an H200 with
    the shapes of Llama-3.1-8B: if there are few tiles, the chunks of a tile are spread over a cluster."""
    found: list[FewCut] = []
    if rows <= OWN_ROWS[shape.blocked]:
        found = [FewCut(8, 1, True, True, resident) for resident in (3, 2)]
        wide = shape.channels >= 2 * UNIT * FILLED or shape.chunks == 1
        found.insert(0 if wide else len(found), FewCut(8, 1, False, True, 2))
    width = 32 if rows <= 32 else 64
    whole = FewCut(width, 2)
    tiles, narrow = whole.tiles(rows, shape), width == 32
    if shape.chunks > 1 and 3 * tiles <= processors:
        found.append(FewCut(width, 1, True, resident=3))
    elif shape.chunks > 1 and 2 * tiles <= processors and (narrow or shape.blocked):
        found.append(FewCut(width, 2, True, resident=2))
    elif tiles > processors and (narrow or not shape.blocked):  # the sums of two blocks fit into registers
        whole = whole._replace(resident=2)
    return tuple(cut for cut in (*found, whole) if cut.fits(shape))


def cuts(rows: int, shape: Shape, processors: int) -> tuple[Cut, ...]:
    """Return the cuts of a product of more rows: up to SMALL rows, tiles so narrow that they fill one wave, two waves,
    and so on."""
    most, unit = MOST_CHANNELS[shape.blocked], 16 if shape.gated else 8
    if rows > SMALL:
        widths = [*range(32, min(most, 192) + 1, 32), *range(208, most + 1, 16)]
    else:
        across = [max(processors * waves // -(-rows // (2 * UNIT)), 1) for waves in range(1, MOST_WAVES + 1)]
        widths = [min(max(-(-shape.channels // (unit * tiles)) * unit, LEAST_CHANNELS), most) for tiles in across]
    return tuple(cut for width in dict.fromkeys(widths) if (cut := Cut(width)).fits(shape))


@cache
def choose_cut(rows: int, shape: Shape, processors: int) -> FewCut | Cut:
    """Return the cut of a product."""
    if rows <= FEW_ROWS:
        return few_cuts(rows, shape, processors)[0]
    return min(cuts(rows, shape, processors), key=lambda cut: cut.clocks(rows, shape, processors))


def fits(channels: int, inner: int) -> bool:
    """Return whether a matrix consists of whole tiles."""
    return channels % UNIT == 0 == inner % STEP


class _Product(ctypes.Structure):
    """The argument of the kernels, padded to its alignment."""

    _fields_ = (("w", Map), ("codes_map", Map),
                *((name, c_void_p) for name in ("x", "codes", "x_scales", "input_scale", "w_scales", "bias", "out")),
                ("x_stride", c_int64),
                *((name, c_int) for name in ("rows", "channels", "steps", "chunk", "scales_row", "stages")),
                *((name, c_void_p) for name in ("residual", "norm", "total")), ("residual_stride", c_int64),
                ("eps", c_float), ("padding", c_int))


def fp8_linear(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None = None, gated: bool = False,
               input_scale: Tensor | None = None, early: bool = False, cut: FewCut | Cut | None = None) -> Tensor:
    """Multiply x [T, K] by values e4m3 [N, K] and add bias [N] -> [T, N]; `gated`: -> silu(first half) * second half
    [T, N / 2]. scales: float32 [N], or [blocks of N, K / 128]. input_scale [1]: the scale of x, with scales [N] only;
    None: one per row. `cut` overrides the automatic choice."""
    shape = Shape(values.shape[0], values.shape[1], scales.dim() == 2, gated)
    out = torch.empty(x.shape[0], shape.stored, dtype=x.dtype, device=x.device)
    if not _in_vectors(x):
        x = x.contiguous()
    for first in range(0, x.shape[0], ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        _multiply(x[rows], values, scales, bias, input_scale, shape, out[rows], early, cut)
    return out


class Norm(NamedTuple):
    """The norm of rows before they are multiplied: they are added to a residual, and the sum is normed."""

    residual: Tensor  # [T, K]
    weight: Tensor  # [K]
    eps: float
    total: Tensor  # [T, K]: output, the sums of rows and residual


def add_norm_fp8_linear(
    x: Tensor, residual: Tensor, norm: Tensor, eps: float, values: Tensor, scales: Tensor, bias: Tensor | None = None,
    gated: bool = False, input_scale: Tensor | None = None, early: bool = False, cut: FewCut | Cut | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Add, norm and multiply, x and residual [T, K], norm [K] -> (`fp8_linear` of rms_norm(x + residual),
    x + residual), in one kernel, or with a kernel before it that norms and rounds rows. None if no kernel supports
    these rows."""
    shape = Shape(values.shape[0], values.shape[1], scales.dim() == 2, gated, normed=True)
    if not len(x) or shape.inner > MOST_NORMED or not all(
            each.dtype is x.dtype and _in_vectors(each) for each in (x, residual, norm)):
        return None
    # Rows of the first product and of the last one.
    row_counts = min(len(x), ROWS_AT_ONCE), (len(x) - 1) % ROWS_AT_ONCE + 1
    used = [cut or choose_cut(rows, shape, processors(x.device)) for rows in row_counts]
    if not all(_rounds_separately(each) or each.norms(shape) for each in used):
        return None
    out = torch.empty(x.shape[0], shape.stored, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for first in range(0, x.shape[0], ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        normed = Norm(residual[rows], norm, eps, total[rows])
        _multiply(x[rows], values, scales, bias, input_scale, shape, out[rows], early, cut, normed)
    return out, total


def _rounds_separately(cut: FewCut | Cut) -> bool:
    """Return whether a separate kernel rounds rows."""
    return isinstance(cut, Cut) or not cut.rounds_rows


def _in_vectors(x: Tensor) -> bool:
    """Return whether a kernel can read 16 bytes of a row at a time."""
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and (x.dim() == 1 or x.stride(0) % 8 == 0)


def _multiply(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, input_scale: Tensor | None, shape: Shape,
              out: Tensor, early: bool, cut: FewCut | Cut | None, norm: Norm | None = None) -> None:
    rows, count = x.shape[0], processors(x.device)
    cut = cut or choose_cut(rows, shape, count)
    rounding, rounded = shape.rounding
    if not cut.norms(shape):
        shape = shape._replace(normed=False)
    found = kernels(cut, shape.config, x.dtype, x.device)
    assert found is not None, "there are kernels"
    blocks = cut.blocks(rows, shape, count)
    stages = cut.stages(shape, blocks, count)
    product = _Product(
        w=cut.weights_map(values, shape),
        x=x.data_ptr(), input_scale=None if input_scale is None else input_scale.data_ptr(),
        w_scales=scales.data_ptr(), bias=None if bias is None else bias.data_ptr(), out=out.data_ptr(),
        x_stride=x.stride(0), rows=rows, channels=shape.channels, steps=shape.steps, chunk=shape.chunk,
        scales_row=-(-rows // cut.rows) * cut.rows, stages=stages)
    if norm is not None:
        product.residual, product.residual_stride = norm.residual.data_ptr(), norm.residual.stride(0)
        product.norm, product.eps, product.total = norm.weight.data_ptr(), norm.eps, norm.total.data_ptr()
    if _rounds_separately(cut):
        codes = torch.empty(rows, shape.inner, dtype=torch.uint8, device=x.device)
        x_scales = torch.empty((shape.steps, product.scales_row) if shape.blocked else (rows,), dtype=torch.float32,
                               device=x.device)
        product.codes, product.x_scales = codes.data_ptr(), x_scales.data_ptr()
        box = cut.rows if isinstance(cut, FewCut) else min(rows, cut.rows)
        product.codes_map = tensor_map(codes.data_ptr(), BYTES, (shape.inner, rows), (shape.inner,), (STEP, box))
        rounds = kernels(rounding, rounded, x.dtype, x.device)
        assert rounds is not None, "there are kernels"
        kernel = "add_rms_norm_quantize" if rounded.normed else "quantize_rows"
        rounds.launch(kernel, rows, rounding.threads, product, 0, early)
    kernel = "add_rms_norm_fp8_linear" if shape.normed else "fp8_linear"
    found.launch(kernel, blocks, cut.threads, product, cut.shared(shape, stages), early)


def prepare(shapes: Iterable[Shape], dtype: torch.dtype, device: torch.device, most_rows: int) -> None:
    """Compile the kernels for products of up to `most_rows` rows with matrices of these shapes, several at a time."""
    if dtype not in TYPES or not capable(device):
        return
    rows = (*range(1, min(most_rows, MOST_PREPARED) + 1, 8), most_rows)
    wanted: dict[Path, set[tuple[str, ...]]] = {}
    for shape in set(shapes):
        found = {choose_cut(count, shape, processors(device)) for count in rows}
        used: list[tuple[FewCut | Cut | Rounding, KernelConfig]] = [
            (cut, shape.config) for cut in found if cut.norms(shape) or not shape.normed]
        if not shape.normed or shape.inner <= MOST_NORMED:
            used.append(shape.rounding)
        for each, config in used:
            wanted.setdefault(each.source, set()).add(each.options(config, dtype))
    for source, options in wanted.items():
        compile_ahead(source, options, device)


def available(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether there are kernels for a device; it is logged if a CUDA device has none."""
    return kernels(FewCut(32, 2), KernelConfig(False, False, CHUNKS), dtype, device) is not None


@cache
def kernels(cut: FewCut | Cut | Rounding, config: KernelConfig, dtype: torch.dtype,
            device: torch.device) -> Module | None:
    """Return the kernels of a cut, or None if there are none."""
    if device.type != "cuda" or torch.version.hip or dtype not in TYPES:
        return None
    unsupported = "compute capability {}.{}".format(*torch.cuda.get_device_capability(device))
    return module_or_none(cut.source, cut.options(config, dtype), device,
                          "FP8 weights are dequantised for every product", "" if capable(device) else unsupported)
