"""Products with integer weights kept in codes, in CUDA C++ for compute capability 9.0 (coded_linear.cu).

w[n, k] = scale * (code[n, k] - zero), or scale * code[n, k] + offset, with one scale, zero and offset per group of
inputs. Sums have the same order for every number of rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from spillover.kernels.cuda.driver.compiled import Module, module_or_none
from spillover.kernels.cuda.driver.tensor_map import CAPABILITY, TYPES, Map, processors, tensor_map

SOURCE = Path(__file__).parent / "coded_linear.cu"
STRIP = 16  # channels of a tile
STEP = 128  # inputs of a tile
CHUNKS = 8  # maximum number of chunks of the inputs
TURN = 2  # steps of a stage; a chunk consists of whole turns
SCALES = {torch.float16: "HALF", torch.bfloat16: "BFLOAT", torch.float32: "SINGLE"}
FEW = 16  # maximum number of rows that mma multiplies; wgmma multiplies more
SUMS_ROWS = 128  # sums of x over groups are padded to a multiple of this many rows
SHARED = 225 << 10  # bytes of shared memory that stages may take
MOST_STAGES = 3  # maximum number of stages for few rows; with more, the next kernel finds no memory to begin early
PACKED = 32 << 20  # number of codes that are packed at a time


@dataclass(frozen=True)
class TileForm:
    """The layout of codes, in the terms of coded_linear.cu."""

    bits: int  # bits of a code: 4 or 8
    groups: int  # number of groups in a step: 1, 2, 4 or 8
    scales: str  # type of scales: HALF, BFLOAT, SINGLE, PAIR, SUPER or SIGNED
    zeros: bool = False  # whether groups have zeros
    middle: int = 0  # with offsets, the number that the code at half the range stands for; 0: that code

    def for_inputs(self, dtype: torch.dtype) -> TileForm:
        """Return the form that kernels use for a type of x: bfloat16 scales of 4-bit codes are folded into the left
        operands, which are then the weights rounded to bfloat16."""
        folded = self.scales == "BFLOAT" and self.bits == 4 and not self.zeros and dtype is torch.bfloat16
        return replace(self, scales="FOLDED_BFLOAT") if folded else self

    @property
    def folded(self) -> bool:
        return self.scales == "FOLDED_BFLOAT"

    @property
    def offsets(self) -> bool:
        return self.scales in ("PAIR", "SUPER")

    @cached_property
    def tile_bytes(self) -> int:
        pair = {"SINGLE": 8, "PAIR": 8, "SIGNED": 2}.get(self.scales, 4)
        return 256 * self.bits + self.factor_bytes + self.groups * (8 * pair + 16 * self.zeros)

    @property
    def factor_bytes(self) -> int:
        return {"SUPER": 64, "SIGNED": 32}.get(self.scales, 0)

    @property
    def half(self) -> int:
        """Return the code at half the range."""
        return 1 << (self.bits - 1)

    def tiles_shape(self, channels: int, inner: int) -> tuple[int, int, int]:
        return channels // STRIP, inner // STEP, self.tile_bytes

    def options(self, dtype: torch.dtype) -> tuple[str, ...]:
        defined = {"BITS": self.bits, "GROUPS": self.groups, "SCALES": self.scales, "ZEROS": int(self.zeros),
                   "MIDDLE": self.middle or self.half, "X_BF16": "true" if dtype is torch.bfloat16 else "false"}
        return tuple(f"-D{name}={value}" for name, value in defined.items())


@dataclass(frozen=True)
class Codes:
    """A [N, K] weight: integer codes, and scales, zeros and offsets of each row's groups of inputs [N, groups]."""

    values: Tensor  # [N, K] uint8
    scales: Tensor  # [N, groups]: float16, bfloat16 or float32; with `factors` uint8, or int8 if there are no offsets
    zeros: Tensor | None = None  # [N, groups] uint8; None: all are half the range of a code, or there are offsets
    offsets: Tensor | None = None  # [N, groups], in the type of scales: added to scale * code
    factors: tuple[Tensor, ...] = ()  # float16 [N, larger groups]: of scales, and of offsets if there are any
    middle: int = 0  # see TileForm

    def form(self, bits: int) -> TileForm:
        """Return the form in which these codes are kept with `bits` bits."""
        group = self.values.shape[1] // self.scales.shape[1]
        name = ("SIGNED", "SUPER")[len(self.factors) - 1] if self.factors else (
            "PAIR" if self.offsets is not None else SCALES[self.scales.dtype])
        return TileForm(bits, max(1, STEP // group), name, self.zeros is not None, self.middle)


def fits(channels: int, inner: int, group: int) -> bool:
    """Return whether a matrix consists of whole tiles, and either groups of whole steps or steps of whole groups."""
    return channels % STRIP == 0 == inner % STEP and (group in (16, 32, 64) or group % STEP == 0)


def in_pairs(output_sizes: tuple[int, ...]) -> bool:
    """Return whether each pair of channels is one of each of two matrices, a gate and the matrix that it gates."""
    return len(output_sizes) == 2 and output_sizes[0] == output_sizes[1] and output_sizes[0] % (STRIP // 2) == 0


def pack(codes: Codes, form: TileForm, halves: bool) -> Tensor:
    """Pack codes into tiles [N / STRIP, K / STEP, bytes]. `halves`: see in_pairs."""
    channels, inner = codes.values.shape
    tiles = torch.empty(form.tiles_shape(channels, inner), dtype=torch.uint8, device=codes.values.device)
    for strips, rows in _strip_groups(channels, inner, halves, codes.values.device):
        pairs = _pairs(codes.values[rows], halves)  # [S, 8, 2, K]
        # [S, g, r, step, v, j, half, t, e]
        lanes = pairs.reshape(*pairs.shape[:3], -1, form.bits // 2, 16 // form.bits, 2, 4, 2)
        if form.bits == 4:
            vectors = lanes.permute(0, 3, 4, 1, 7, 5, 8, 6, 2)  # [S, step, v, g, t, j, e, half, r]
            vectors = vectors[..., 0] | vectors[..., 1] << 4
        else:
            vectors = lanes.permute(0, 3, 4, 1, 7, 5, 6, 8, 2)  # [S, step, v, g, t, j, half, e, r]
        parts = [vectors.flatten(2), *(part.flatten(2) for part in _numbers(codes, form, rows, halves, inner))]
        tiles[strips] = torch.cat([part.contiguous().view(torch.uint8) for part in parts], 2)
    return tiles


def unpack(tiles: Tensor, form: TileForm, halves: bool) -> Tensor:
    """Return the weight [N, K] of tiles in float32."""
    strips, steps, _ = tiles.shape
    codes, numbers = tiles.split_with_sizes([256 * form.bits, form.tile_bytes - 256 * form.bits], 2)
    if form.bits == 4:
        vectors = codes.reshape(strips, steps, 2, 8, 4, 4, 2, 2)  # [S, step, v, g, t, j, e, half]
        nibbles = torch.stack((vectors & 15, vectors >> 4), -1)  # [..., r]
        values = nibbles.permute(0, 3, 8, 1, 2, 5, 7, 4, 6)  # [S, g, r, step, v, j, half, t, e]
    else:
        values = codes.reshape(strips, steps, 4, 8, 4, 2, 2, 2, 2).permute(0, 3, 8, 1, 2, 5, 6, 4, 7)
    value = values.reshape(strips, 8, 2, steps, form.groups, -1).float()  # [S, g, r, step, group, k]

    def spread(part: Tensor) -> Tensor:  # [S, step, group, g, r] -> broadcast with value
        return part.float().permute(0, 3, 4, 1, 2)[..., None]

    def typed(part: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
        return part.contiguous().view(dtype).view(strips, steps, *shape)

    groups = form.groups
    factors, numbers = numbers.split_with_sizes([form.factor_bytes, numbers.shape[2] - form.factor_bytes], 2)
    if form.offsets:
        pair = typed(numbers, torch.uint8 if form.scales == "SUPER" else torch.float16, groups, 8, 2, 2)
        scale, offset = spread(pair[..., 0]), spread(pair[..., 1])
        if form.scales == "SUPER":
            two = typed(factors, torch.float16, 1, 8, 2, 2)
            scale, offset = scale * spread(two[..., 0]), offset * spread(two[..., 1])
        value = value - float(form.half - form.middle if form.middle else 0)
    else:
        dtype = torch.int8 if form.scales == "SIGNED" else next(
            dtype for dtype, name in SCALES.items() if name == form.scales)
        size = 16 * groups * dtype.itemsize
        scale = spread(typed(numbers[..., :size], dtype, groups, 8, 2))
        if form.scales == "SIGNED":
            scale = scale * spread(typed(factors, torch.float16, 1, 8, 2))
        zero = spread(typed(numbers[..., size:], torch.uint8, groups, 8, 2)) if form.zeros else float(form.half)
        value, offset = value - zero, torch.zeros(1, device=tiles.device)
    weight = (value * scale + offset).reshape(strips, 8, 2, -1)
    return (weight.permute(2, 0, 1, 3) if halves else weight).reshape(strips * STRIP, -1)


def _strip_groups(channels: int, inner: int, halves: bool, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of strips with the weight's rows in them, a few strips at a time."""
    strips, each = channels // STRIP, max(1, PACKED // (STRIP * inner))
    for first in range(0, strips, each):
        last = min(strips, first + each)
        if halves:
            rows = torch.arange(first * 8, last * 8, device=device)
            yield slice(first, last), torch.cat((rows, rows + channels // 2))
        else:
            yield slice(first, last), torch.arange(first * STRIP, last * STRIP, device=device)


def _pairs(part: Tensor, halves: bool) -> Tensor:
    """Return [rows, columns] as [strips, 8, 2, columns], with the pair of rows of each of eight lanes g."""
    return part.view(2, -1, 8, part.shape[1]).permute(1, 2, 0, 3) if halves else part.view(-1, 8, 2, part.shape[1])


def _numbers(codes: Codes, form: TileForm, rows: Tensor, halves: bool, inner: int) -> Iterator[Tensor]:
    """Yield the parts of tiles after their codes (factors, scales and offsets, zeros), each [S, steps, ...]."""
    steps = inner // STEP

    def spread(part: Tensor, groups: int) -> Tensor:  # [N, any] -> [S, steps, groups, 8, 2]
        pairs = _pairs(part[rows].repeat_interleave(steps * groups // part.shape[1], 1), halves)
        return pairs.reshape(*pairs.shape[:3], steps, groups).permute(0, 3, 4, 1, 2)

    if codes.factors:
        yield torch.stack([spread(factor, 1) for factor in codes.factors], -1)
    scales = spread(codes.scales, form.groups)
    if codes.offsets is not None:
        yield torch.stack((scales, spread(codes.offsets, form.groups)), -1)
    else:
        yield scales
    if codes.zeros is not None:
        yield spread(codes.zeros, form.groups)


class Cut(NamedTuple):
    """The cut of a product of few rows: rows of a tile (NT * 8), strips of a block, teams of warps along the inputs."""

    tiles: int
    strips: int
    teams: int

    @property
    def kernel(self) -> str:
        return "few_rows_{}_{}_{}".format(*self)

    @property
    def rows(self) -> int:
        return self.tiles * 8

    @property
    def threads(self) -> int:
        return self.strips * self.teams * 32

    @property
    def resident(self) -> int:
        """Return the number of blocks that a multiprocessor's registers allow: BLOCKS of FEW in coded_linear.cu."""
        return 3 if self.tiles == 1 else 2

    def shared(self, form: TileForm, rows: int, stages: int) -> int:
        """Return the bytes of shared memory that a block takes."""
        x = -(-TURN * (min(rows, 8) if self.tiles == 1 else self.rows) * 256 // 1024) * 1024
        sums = form.groups * self.rows * 4 if form.offsets and self.tiles > 1 else 0
        tiles = TURN * (self.strips * form.tile_bytes + sums)
        buffers = 2 if self.tiles == 1 else 1  # of sums of chunks
        parts = CHUNKS * self.strips * self.tiles * 512 * buffers if self.teams > 1 else 0
        return self.teams * stages * (x + tiles + 16) + parts


class ManyCut(NamedTuple):
    """The cut of a product of more rows: rows of a tile (NT * 8), its channels (64 each), the number of blocks of a
    cluster that share its chunks, and the teams of warpgroups that share those of a block."""

    tiles: int
    channels: int
    spread: int = 1
    teams: int = 1

    @property
    def kernel(self) -> str:
        return f"many_rows_{self.tiles}_{self.channels}_{self.teams}"

    @property
    def rows(self) -> int:
        return self.tiles * 8

    @property
    def strips(self) -> int:
        return self.channels * 64 // STRIP

    @property
    def threads(self) -> int:
        return (self.channels * self.teams + 1) * 128

    def chunk_sums_bytes(self, form: TileForm) -> int:
        """Return the bytes that hold sums of chunks: their total, unless registers hold it, or all but a block's last,
        which uses the memory of stages."""
        if self.spread == 1:  # TOTALS in coded_many.cuh
            in_registers = self.tiles * self.channels < (64 if form.folded and self.channels == 2 else 32)
            return 0 if in_registers else self.sum_bytes
        return self.sum_bytes * (CHUNKS // (self.spread * self.teams) - 1)

    @property
    def sum_bytes(self) -> int:
        """Return the bytes of the sums of one chunk of each team."""
        return self.tiles * self.channels * self.teams * 2048

    def stage(self, form: TileForm) -> int:
        """Return the bytes of a stage: a step's rows of x, tiles and sums of x, and barriers."""
        sums = form.groups * self.rows * 4 if form.offsets else 0
        return -(-(self.rows * STEP * 2 + self.strips * form.tile_bytes + sums) // 1024) * 1024 + 16

    @property
    def least_stages(self) -> int:
        """Return the number of stages that a block needs: a team reads its next step before it releases one."""
        return 2 * self.teams

    def stages(self, form: TileForm) -> int:
        """Return the number of stages that fit into shared memory, as many for each team."""
        return (SHARED - self.chunk_sums_bytes(form)) // self.stage(form) // self.teams * self.teams

    def shared(self, form: TileForm, stages: int) -> int:
        """Return the bytes of shared memory that a block takes."""
        return self.chunk_sums_bytes(form) + max(stages * self.stage(form), self.sum_bytes if self.spread > 1 else 0)

    def serves(self, form: TileForm) -> bool:
        """Return whether enough stages fit into shared memory."""
        return self.stages(form) >= self.least_stages

    def at_once(self, processors: int) -> int:
        """Return the number of tiles that run at the same time: 30 clusters of 4 fit an H200 of 132 multiprocessors."""
        clusters = {1: 1.0, 2: 0.5, 4: 10 / 44, 8: 5 / 44}
        return max(1, int(processors * clusters[self.spread]))

    def clocks(self, rows: int, strips: int, steps: int, form: TileForm, processors: int) -> float:
        """Estimate the clock cycles of a product, as fitted to an H200. A step is bound by the tensor cores, by the
        instructions that make operands and add sums, which overlap in part, or by copies: tiles from device memory, x
        from the cache."""
        row_tiles, box = -(-rows // self.rows), min(rows, self.rows)
        tiles = row_tiles * -(-strips // self.strips)
        groups = self.channels * self.teams
        tensor = groups * 4 * max(self.rows, 52)
        adds = form.groups * (5 * self.tiles * (2 if form.offsets else 1) + 8)
        issue = groups * 200 if form.folded else groups * (5 if form.bits == 4 else 57) + max(groups, 2.5) * adds
        copied = self.teams * (self.strips * form.tile_bytes / 97 / min(row_tiles, 2) + box * STEP * 2 / 59)
        step = max(tensor, issue, copied) + 0.37 * min(tensor, issue)
        own = min(steps, -(-steps // (CHUNKS * TURN)) * TURN * (CHUNKS // (self.spread * self.teams)))
        tile = own * step + 8300 + 12 * self.tiles * groups + 400 * (self.spread > 1)
        return -(-tiles // self.at_once(processors)) * tile + 700


FEW_CUTS = (Cut(1, 1, 8), Cut(1, 2, 4), Cut(2, 2, 4), Cut(2, 4, 2))
MANY_CUTS = (*(ManyCut(tiles, channels, spread) for tiles, channels in ((4, 2), (4, 4), (8, 2), (8, 4), (16, 2))
               for spread in (1, 2, 4, 8) if (tiles * channels, spread) != (32, 2)),  # three chunks leave no stages
             ManyCut(8, 1, 2, 4))


def choose_cut(rows: int, strips: int, steps: int, form: TileForm, processors: int) -> Cut | ManyCut:
    """Return the cut of a product: for few rows by measurements on an H200 with the shapes of Llama-3.1-8B, for more by
    ManyCut.clocks."""
    if rows <= 8:
        return FEW_CUTS[1 if rows > 4 and strips > 4 * processors else 0]
    if rows <= FEW:
        return FEW_CUTS[3 if strips > 2 * processors else 2]
    return _choose_many_cut(-(-rows // 16) * 16, strips, steps, form, processors)


@cache
def _choose_many_cut(rows: int, strips: int, steps: int, form: TileForm, processors: int) -> ManyCut:
    return min(many_cuts(rows, steps, form), key=lambda cut: cut.clocks(rows, strips, steps, form, processors))


def many_cuts(rows: int, steps: int, form: TileForm) -> list[ManyCut]:
    """Return the cuts that can compute a product of more than FEW rows and are no larger than it needs."""
    chunks = -(-steps // (-(-steps // (CHUNKS * TURN)) * TURN))
    sizes = sorted({cut.rows for cut in MANY_CUTS})
    least = next((size for size in sizes if size >= rows), sizes[-1])
    return [cut for cut in MANY_CUTS if cut.rows <= least and cut.serves(form)
            and (cut.spread == 1 or CHUNKS // cut.spread < chunks)]


class _Product(ctypes.Structure):
    """The argument of the kernels, padded to its alignment."""

    _fields_ = (("map", Map), *((name, c_void_p) for name in ("x", "tiles", "bias", "sums", "out")),
                ("x_stride", c_int64),
                *((name, c_int) for name in ("rows", "channels", "steps", "chunk", "sums_row", "stages")),
                *((name, c_int) for name in ("halves", "gated", "spread")), ("padding", c_int * 11))


def coded_linear(x: Tensor, tiles: Tensor, form: TileForm, bias: Tensor | None = None, halves: bool = False,
                 gated: bool = False, early: bool = False, cut: Cut | ManyCut | None = None, stages: int = 0) -> Tensor:
    """Multiply x [T, K] by tiles and add bias [N] -> [T, N]; `gated`: -> silu(first half) * second half [T, N / 2],
    with tiles that were packed with `halves`. `cut` and `stages` override the automatic choice."""
    rows, channels, steps = x.shape[0], tiles.shape[0] * STRIP, tiles.shape[1]
    out = torch.empty(rows, channels // 2 if gated else channels, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    found = kernels(form, x.dtype, x.device)
    assert found is not None, "there are kernels"
    if x.stride(1) != 1 or x.data_ptr() % 16 or x.stride(0) % 8:
        x = x.contiguous()
    form, count = form.for_inputs(x.dtype), processors(x.device)
    cut = cut or choose_cut(rows, tiles.shape[0], steps, form, count)
    sums_row = -(-rows // SUMS_ROWS) * SUMS_ROWS
    chunk = -(-steps // (CHUNKS * TURN)) * TURN
    box, layers = (min(rows, 8) if cut.tiles == 1 else cut.rows), (2 * TURN if isinstance(cut, Cut) else 2)
    product = _Product(
        map=tensor_map(x.data_ptr(), TYPES[x.dtype], (64, rows, steps * 2), (x.stride(0) * 2, 128), (64, box, layers)),
        x=x.data_ptr(), tiles=tiles.data_ptr(), bias=None if bias is None else bias.data_ptr(), out=out.data_ptr(),
        x_stride=x.stride(0), rows=rows, channels=channels, steps=steps, chunk=chunk, sums_row=sums_row,
        halves=halves, gated=gated, spread=1)
    if form.offsets and cut.tiles > 1:
        sums = torch.empty((steps + TURN) * form.groups, sums_row, dtype=torch.float32, device=x.device)
        product.sums = sums.data_ptr()
        found.launch("group_sums", -(-steps * (sums_row // 8) // 4), 128, product, 0, early)
    tile_count = -(-rows // cut.rows) * -(-tiles.shape[0] // cut.strips)
    if isinstance(cut, Cut):
        product.stages, blocks = _few_blocks(cut, form, rows, chunk, tile_count, count)
        product.stages = stages or product.stages
        found.launch(cut.kernel, blocks, cut.threads, product, cut.shared(form, rows, product.stages), early)
        return out
    product.stages, product.spread = stages or cut.stages(form), cut.spread
    blocks = min(tile_count, count) if cut.spread == 1 else tile_count * cut.spread
    found.launch(cut.kernel, blocks, cut.threads, product, cut.shared(form, product.stages), early, cut.spread)
    return out


class _LookupArguments(ctypes.Structure):
    """The argument of the kernel `look_up`."""

    _fields_ = (*((name, c_void_p) for name in ("ids", "tiles", "out")), ("steps", c_int))


def embedding_lookup(ids: Tensor, tiles: Tensor, form: TileForm, dtype: torch.dtype) -> Tensor:
    """Look up rows ids [T] int64 of a weight -> [T, K] in `dtype`; its tiles must not be packed with `halves`."""
    steps = tiles.shape[1]
    out = torch.empty(len(ids), steps * STEP, dtype=dtype, device=tiles.device)
    found = kernels(form, dtype, tiles.device)
    assert found is not None, "there are kernels"
    if len(ids):
        ids = ids.contiguous()
        arguments = _LookupArguments(ids.data_ptr(), tiles.data_ptr(), out.data_ptr(), steps)
        found.launch("look_up", len(ids) * steps, STEP, arguments)
    return out


@cache
def _few_blocks(cut: Cut, form: TileForm, rows: int, chunk: int, tiles: int, processors: int) -> tuple[int, int]:
    """Return stages and blocks: the most stages, up to MOST_STAGES and a team's turns, with which all tiles are
    multiplied at the same time; else 2, and as many blocks as run at once."""
    turns = chunk // TURN * (CHUNKS // cut.teams)
    stages = at_once = 0
    for stages in range(max(2, min(MOST_STAGES, turns)), 1, -1):
        at_once = processors * min(cut.resident, SHARED // cut.shared(form, rows, stages))
        if at_once >= tiles:
            break
    return stages, min(tiles, at_once)


def serves(capability: tuple[int, int], dtype: torch.dtype) -> bool:
    """Return whether there are kernels for a compute capability and a type of x."""
    return capability == CAPABILITY and dtype in TYPES and not torch.version.hip


@cache
def kernels(form: TileForm, dtype: torch.dtype, device: torch.device) -> Module | None:
    """Return the kernels for a form, or None if there are none, which is logged for a CUDA device."""
    if device.type != "cuda" or torch.version.hip or dtype not in TYPES:
        return None
    capability = torch.cuda.get_device_capability(device)
    unsupported = "compute capability {}.{}, not {}.{}".format(*capability, *CAPABILITY)
    return module_or_none(SOURCE, form.for_inputs(dtype).options(dtype), device,
                          "weights in codes are dequantised for every product",
                          "" if serves(capability, dtype) else unsupported)
