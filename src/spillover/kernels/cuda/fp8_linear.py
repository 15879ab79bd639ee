"""Products of FP8 weights and activations, in CUDA C++ for compute capability 9.0 (fp8_linear.cu).

Activations are rounded to e4m3 on the way: a row by its largest number, or by a scale that the checkpoint gives, or
beside weights in blocks each 128 inputs of a row by theirs. Sums have one order for every number of rows.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable
from ctypes import c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from spillover.kernels.cuda.compiled import CudaError, Module, compile_ahead
from spillover.kernels.cuda.tensor_map import BYTES, TYPES, Map, capable, processors, sums_options, tensor_map

log = logging.getLogger("spillover.kernels")

SOURCE = Path(__file__).parent / "fp8_linear.cu"
STEP = 128  # inputs
UNIT = 64  # channels that a warpgroup multiplies
CHUNKS = 4  # of the inputs
SHORTEST = 2  # steps of a chunk
QUANTIZERS = 512  # threads
SHARED = 226 << 10  # bytes of a multiprocessor's shared memory
OWN_SHARED = 1 << 10  # that a block takes besides what it asks for
FEW_ROWS = {False: 1, True: 2}  # by `blocked`: up to which each block rounds rows of x itself
TILE_ROWS = (32, 64, 96, 128)
FILLED = 132  # multiprocessors that a block each keeps busy
PIECE_ROWS = 4096  # that are rounded and multiplied at a time
IN_FLIGHT = 96 << 10  # bytes of weights on their way to a multiprocessor
MOST_PREPARED = 2048  # rows; those of more have cuts of these


class Form(NamedTuple):
    """What kernels are compiled for besides a cut."""

    blocked: bool  # scales of 128 x 128 weights, and of 128 inputs
    gated: bool
    chunks: int


class Shape(NamedTuple):
    """A product's matrix, and how it is kept and used."""

    channels: int
    inner: int
    blocked: bool
    gated: bool = False

    @property
    def steps(self) -> int:
        return self.inner // STEP

    @property
    def chunks(self) -> int:
        """Chunks of the inputs: a constant of the matrix, as another number changes the bits of every product."""
        return CHUNKS if self.steps >= CHUNKS * SHORTEST else 1

    @property
    def chunk(self) -> int:
        """Steps of a chunk."""
        return -(-self.steps // self.chunks)

    @property
    def form(self) -> Form:
        return Form(self.blocked, self.gated, self.chunks)


class Cut(NamedTuple):
    """How a product is cut, in the words of fp8_linear.cu."""

    rows: int
    groups: int = 1
    spread: bool = False  # the chunks of a tile over a cluster of blocks
    own: bool = False  # blocks round rows themselves
    resident: int = 1  # blocks of a multiprocessor

    def threads(self, shape: Shape) -> int:
        """Return the threads of a block; a whole warpgroup that copies has registers to give."""
        moves_registers = shape.chunks > 1 and not self.spread and self.rows > 64
        return 128 * self.groups + (128 if moves_registers else 32)

    def tiles(self, rows: int, shape: Shape) -> int:
        return -(-rows // self.rows) * -(-shape.channels // (UNIT * self.groups))

    def blocks(self, rows: int, shape: Shape, processors: int) -> int:
        """Return the blocks of a launch: those of a tile, or as many as run at a time."""
        tiles = self.tiles(rows, shape)
        return tiles * shape.chunks if self.spread else min(tiles, processors * self.resident)

    def stage_bytes(self, shape: Shape) -> int:
        """Return the bytes of a stage, with its barriers and scales."""
        x = 0 if self.own else self.rows * STEP + (self.rows * 4 if shape.blocked else 0)
        return self.groups * UNIT * STEP + x + 16

    def fixed_bytes(self, shape: Shape) -> int:
        """Return the bytes besides stages: own rows, their scales, and those of weights."""
        steps = shape.chunk if self.spread else shape.steps
        own = self.rows * (STEP * steps + 4 * (steps if shape.blocked else 2)) if self.own else 0
        return own + (self.groups * 2 * steps * 4 if shape.blocked else 0)

    def stages(self, shape: Shape, blocks: int, processors: int) -> int:
        """Return as many stages as fit; of few rows only as many as keep the memory busy, so that the next kernel's
        blocks find room before this one has ended."""
        most = (SHARED // self.resident - OWN_SHARED - self.fixed_bytes(shape)) // self.stage_bytes(shape)
        if self.own:
            beside = min(self.resident, -(-blocks // processors))
            most = min(most, max(4, -(-IN_FLIGHT // (beside * self.groups * UNIT * STEP))))
        return min(most, shape.chunk if self.spread else 16)

    def shared(self, shape: Shape, stages: int) -> int:
        """Return the bytes of shared memory of a block: of a tile's sums, if those of a cluster meet there."""
        sums = self.rows * self.groups * UNIT * 4 if self.spread else 0
        return max(sums, stages * self.stage_bytes(shape) + self.fixed_bytes(shape))

    def fits(self, shape: Shape) -> bool:
        return self.stages(shape, 1, 1) >= min(3, shape.chunk) and (not self.spread or shape.chunks > 1)

    def options(self, form: Form, dtype: torch.dtype) -> tuple[str, ...]:
        defined = {"BLOCKED": int(form.blocked), "GATED": int(form.gated), "ROWS": self.rows, "GROUPS": self.groups,
                   "CHUNKS": form.chunks, "CLUSTER": form.chunks if self.spread else 1, "OWN_X": int(self.own),
                   "RESIDENT": self.resident, "X_BF16": int(dtype is torch.bfloat16), **sums_options(self.rows)}
        return tuple(f"-D{name}={value}" for name, value in defined.items())


def few_cuts(shape: Shape) -> tuple[Cut, ...]:
    """Return the cuts whose blocks round up to FEW_ROWS rows themselves, the preferred ones first."""
    spread = tuple(Cut(8, 1, True, True, resident) for resident in (5, 3, 2))
    wide = shape.channels >= 2 * UNIT * FILLED or shape.chunks == 1
    return (Cut(8, 1, False, True, 2), *spread) if wide else (*spread, Cut(8, 1, False, True, 2))


def tiles_of(rows: int) -> int:
    """Return the rows of a tile where a product has more than blocks round themselves."""
    each = -(-rows // -(-rows // TILE_ROWS[-1]))
    return next(width for width in TILE_ROWS if width >= each)


@cache
def chosen(rows: int, shape: Shape, processors: int) -> Cut:
    """Choose how a product is cut, by what was fastest on an H200 with the shapes of Llama-3.1-8B: the chunks of a tile
    over a cluster where tiles are few."""
    cuts = few_cuts(shape) if rows <= FEW_ROWS[shape.blocked] else ()
    width = tiles_of(rows)
    whole = Cut(width, 2)
    if shape.chunks > 1 and 3 * whole.tiles(rows, shape) <= processors:
        cuts += (Cut(width, 1, True, resident=3) if width <= 64 else Cut(width, 2, True),)
    return next(cut for cut in (*cuts, whole) if cut.fits(shape))


def fits(channels: int, inner: int) -> bool:
    """Return whether a matrix is of whole tiles."""
    return channels % UNIT == 0 == inner % STEP


class _Product(ctypes.Structure):
    """What the kernels take, as large as its alignment makes it."""

    _fields_ = (("w", Map), ("codes_map", Map),
                *((name, c_void_p) for name in ("x", "codes", "x_scales", "input_scale", "w_scales", "bias", "out")),
                ("x_stride", c_int64),
                *((name, c_int) for name in ("rows", "channels", "steps", "chunk", "scales_row", "stages")),
                ("padding", c_int * 10))


def fp8_linear(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None = None, gated: bool = False,
               input_scale: Tensor | None = None, early: bool = False, cut: Cut | None = None) -> Tensor:
    """Multiply x [T, K], values e4m3 [N, K] and bias [N] -> [T, N]; `gated`: -> silu(first half) * second half
    [T, N / 2]. scales: float32 [N], or [blocks of N, K / 128]. input_scale [1]: of x, instead of its own, beside scales
    [N]. `cut`: instead of the one that would be chosen."""
    shape = Shape(values.shape[0], values.shape[1], scales.dim() == 2, gated)
    out = torch.empty(x.shape[0], shape.channels // 2 if gated else shape.channels, dtype=x.dtype, device=x.device)
    if x.stride(1) != 1 or x.data_ptr() % 16 or x.stride(0) % 8:
        x = x.contiguous()
    for first in range(0, x.shape[0], PIECE_ROWS):
        rows = slice(first, first + PIECE_ROWS)
        _multiply(x[rows], values, scales, bias, input_scale, shape, out[rows], early, cut)
    return out


def _multiply(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, input_scale: Tensor | None, shape: Shape,
              out: Tensor, early: bool, cut: Cut | None) -> None:
    rows, count = x.shape[0], processors(x.device)
    cut = cut or chosen(rows, shape, count)
    found = kernels(cut, shape.form, x.dtype, x.device)
    assert found is not None, "there are kernels"
    blocks = cut.blocks(rows, shape, count)
    stages = cut.stages(shape, blocks, count)
    groups, inner = shape.channels // 16, shape.inner
    apart = (shape.channels // 2 * inner, 8 * inner) if shape.gated else (8 * inner, 16 * inner)
    product = _Product(
        w=tensor_map(values.data_ptr(), BYTES, (inner, 8, 2, groups), (inner, *apart), (STEP, 8, 2, 4 * cut.groups)),
        x=x.data_ptr(), input_scale=None if input_scale is None else input_scale.data_ptr(),
        w_scales=scales.data_ptr(), bias=None if bias is None else bias.data_ptr(), out=out.data_ptr(),
        x_stride=x.stride(0), rows=rows, channels=shape.channels, steps=shape.steps, chunk=shape.chunk,
        scales_row=-(-rows // cut.rows) * cut.rows, stages=stages)
    if not cut.own:
        codes = torch.empty(rows, inner, dtype=torch.uint8, device=x.device)
        x_scales = torch.empty((shape.steps, product.scales_row) if shape.blocked else (rows,), dtype=torch.float32,
                               device=x.device)
        product.codes, product.x_scales = codes.data_ptr(), x_scales.data_ptr()
        product.codes_map = tensor_map(codes.data_ptr(), BYTES, (inner, rows), (inner,), (STEP, cut.rows))
        found.launch("quantize_rows", rows, QUANTIZERS, product, 1024, early)
    found.launch("fp8_linear", blocks, cut.threads(shape), product, cut.shared(shape, stages), early)


def prepare(shapes: Iterable[Shape], dtype: torch.dtype, device: torch.device, most_rows: int) -> None:
    """Compile what products of up to `most_rows` rows with matrices of these shapes will use, several at a time."""
    if dtype not in TYPES or not capable(device):
        return
    rows = (*range(1, min(most_rows, MOST_PREPARED) + 1, 8), most_rows)
    wanted = {chosen(count, shape, processors(device)).options(shape.form, dtype) for shape in set(shapes)
              for count in rows}
    compile_ahead(SOURCE, wanted, device)


def available(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether there are kernels; says so in the log where a CUDA device has none."""
    return kernels(Cut(8, 1, True, True, 5), Form(False, False, CHUNKS), dtype, device) is not None


@cache
def kernels(cut: Cut, form: Form, dtype: torch.dtype, device: torch.device) -> Module | None:
    """Return the kernels of a cut, None where there are none."""
    if device.type != "cuda" or torch.version.hip or dtype not in TYPES:
        return None
    try:
        if not capable(device):
            raise CudaError("compute capability {}.{}".format(*torch.cuda.get_device_capability(device)))
        return Module(SOURCE, cut.options(form, dtype), device)
    except CudaError as problem:
        _warn(str(problem).partition("\n")[0])
        return None


@cache
def _warn(problem: str) -> None:
    log.warning("FP8 weights are dequantised for every product: %s", problem)
