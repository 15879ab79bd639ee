"""Experts that the host's cores compute from weights in host memory, while a device computes the others.

An expert's tensors are one record of bytes, and a layer's records are contiguous. Work arrives by a call, or through a
queue that the device writes in the middle of its step. The class has its own threads; they spin for the next post while
steps run and sleep when none arrives.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from spillover.errors import SpilloverError
from spillover.kernels import native
from spillover.kernels.activation import clamped_swiglu_reference, silu_and_mul_reference
from spillover.kernels.fields import LinearShape
from spillover.kernels.formats.base import HOST_TYPES, Linear, Weight, WeightFormat
from spillover.kernels.linear import linear_reference
from spillover.kernels.moe.experts import Experts, ExpertWeights, expert_stacks
from spillover.kernels.moe.host_expert_queue import COUNT, DONE, FAILED, LAYER, PAIR, POSTED, TOKENS, HostExpertQueue
from spillover.kernels.moe.records import Record

GRAIN = 32 << 10  # bytes of weights that a thread processes at a time
TILE_ROWS = 4  # from this many rows on, cores that have tile instructions compute an expert with them, in bfloat16
PLAIN = 5  # formats with this WeightFormat.host_code or a higher one are always computed in float32
NAP = 50e-6  # seconds between polls of the queue if torch computes
REFUSED = 2  # value of FAILED: the host cannot interpret the post


@dataclass(frozen=True)
class ExpertLayout:
    """The layout of an expert's record: gate_up [2I, H] and down [H, I], named as in ExpertWeights, in one format.

    With a `limit` the activation is the clamped SwiGLU with gate and up rows interleaved, without it SiLU-mul with all
    gate rows before the up rows. A dense MLP is a layer with one expert.
    """

    record: Record
    format: WeightFormat
    dtype: torch.dtype  # type of biases, and of dense values
    hidden: int
    inner: int
    experts: int  # number of experts of a layer, each with a record
    limit: float | None = None

    @classmethod
    def packed(cls, weight_format: WeightFormat, dtype: torch.dtype, hidden: int, inner: int, experts: int,
               limit: float | None = None, biased: bool = False) -> ExpertLayout:
        """Return the layout with tensors one after another: those of gate_up and its bias, then those of down."""
        one: dict[str, Weight] = {}
        sizes = (inner, inner) if limit is None else (2 * inner,)  # interleaved rows are quantised together
        for name, shape in (("experts.gate_up", LinearShape(sizes, hidden)),
                            ("experts.down", LinearShape((hidden,), inner))):
            fields = weight_format.fields(shape, str(dtype).removeprefix("torch."))
            one[name] = Linear(weight_format, shape, tuple(
                torch.empty(1, *field.shape, dtype=getattr(torch, field.dtype), device="meta") for field in fields))
            if biased:
                one[f"{name}_bias"] = torch.empty(1, shape.out_features, dtype=dtype, device="meta")
        return cls(Record.of(one), weight_format, dtype, hidden, inner, experts, limit)

    def stacks(self, records: Tensor) -> tuple[Experts, Experts]:
        """Return gate_up and down as views of the records uint8 [E, record.nbytes] of a layer."""
        return expert_stacks(cast(ExpertWeights, self.record.stacks(records)))

    @property
    def numbers(self) -> list[int]:
        """Return format, sizes, and offsets of each linear's values, scales and bias (-1: none), for native kernels."""
        code = self.format.host_code(self.dtype)
        assert code is not None, f"the host computes no {self.format}"
        at = [offset for name in ("experts.gate_up", "experts.down")
              for offset in (*(*self.record.offsets(name), -1)[:2], (*self.record.offsets(f"{name}_bias"), -1)[0])]
        return [code, HOST_TYPES.index(self.dtype), self.hidden, self.inner, self.experts, self.record.nbytes,
                int(self.limit is not None), *at]


class HostExperts:
    """The experts of some layers, computed on dedicated threads."""

    def __init__(
        self, layout: ExpertLayout, layer_bases: Sequence[int], threads: int | None = None, grain: int = GRAIN,
        tile_rows: int = TILE_ROWS,
    ) -> None:
        """Start the threads. `layer_bases`: address of each layer's first record, 0 for a layer that is not computed
        here; the memory must outlive this object. `threads`: by default all cores but two, which are left to the
        engine. `tile_rows`: see TILE_ROWS; 0: always float32."""
        self.layout = layout
        self.threads = threads or max(1, available_cores() - 2)
        self._bases = tuple(layer_bases)
        self._library = native.library()
        self.tiled = (layout.dtype is torch.bfloat16 and tile_rows > 0 and layout.numbers[0] < PLAIN
                      and _has_tiles(self._library))
        self._reader: _Reader | None = None
        self._handle = 0
        if self._library is None:
            return
        numbers = (ctypes.c_int64 * 14)(*layout.numbers, tile_rows)
        bases = (ctypes.c_int64 * len(self._bases))(*self._bases)
        self._handle = self._library.host_experts_new(
            numbers, layout.limit or 0.0, bases, len(self._bases), self.threads, grain
        )
        if not self._handle:
            raise SpilloverError(f"the host cannot start {self.threads} threads for experts; ask for fewer")
        # Ends the threads even without close(), and before the memory of the queue that they read is freed.
        self._end = weakref.finalize(self, self._library.host_experts_delete, self._handle)

    def run(self, layer: int, x: Tensor, pairs: Tensor) -> Tensor:
        """Compute x [T, H] float32, pairs int32 [n, 4] (token, expert, ...) -> [n, H], not multiplied by shares."""
        x, pairs = x.float().contiguous(), pairs.int().contiguous()
        assert x.shape[1] == self.layout.hidden, f"x has {x.shape[1]} columns, the experts {self.layout.hidden}"
        assert pairs.shape[1] == PAIR
        out = torch.empty(len(pairs), self.layout.hidden)
        if self._library is None:
            out.copy_(self._computed_by_torch(layer, x, pairs))
            return out
        assert self._handle, "closed"
        wrong = self._library.host_experts_run(
            self._handle, layer, x.data_ptr(), len(x), pairs.data_ptr(), len(pairs), out.data_ptr()
        )
        if wrong == 2:
            raise MemoryError(f"no memory for {len(pairs)} rows on the host")
        if wrong:
            raise IndexError(f"no such layer, token or expert on the host: layer {layer}, pairs {pairs.tolist()[:8]}")
        return out

    def attach(self, queue: HostExpertQueue) -> None:
        """Serve this queue from now on, instead of any other."""
        self.detach()
        if self._library is None:
            self._reader = _Reader(self, queue)
            return
        self._library.host_experts_attach(
            self._handle, queue.header.data_ptr(), queue.pairs.data_ptr(), queue.x.data_ptr(), queue.out.data_ptr(),
            len(queue.pairs), len(queue.x),
        )
        self._queue = queue  # keeps its memory alive

    def detach(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._library is not None and self._handle:
            self._library.host_experts_detach(self._handle)

    def wake(self) -> None:
        """Make the threads spin: a step was launched, and may soon post experts."""
        if self._library is not None and self._handle:
            self._library.host_experts_wake(self._handle)

    def close(self) -> None:
        self.detach()
        if self._handle:
            self._end()
        self._handle = 0

    def __enter__(self) -> HostExperts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _computed_by_torch(self, layer: int, x: Tensor, pairs: Tensor) -> Tensor:
        if not 0 <= layer < len(self._bases) or not self._bases[layer]:
            raise IndexError(f"no such layer on the host: {layer}")
        size = self.layout.experts * self.layout.record.nbytes
        memory = (ctypes.c_uint8 * size).from_address(self._bases[layer])
        records = torch.frombuffer(memory, dtype=torch.uint8).view(self.layout.experts, -1)
        return host_experts_reference(self.layout, records, x, pairs)


def _has_tiles(library: ctypes.CDLL | None) -> bool:
    return library is not None and bool(library.host_experts_tiles())


def host_experts_reference(
    layout: ExpertLayout, records: Tensor, x: Tensor, pairs: Tensor, rounded: bool = False
) -> Tensor:
    """Compute experts of records uint8 [E, record.nbytes], x [T, H], pairs int32 [n, 4] -> [n, H], float32.

    `rounded`: x and the activation are rounded to bfloat16, as if computed with tile instructions.
    """
    first, second = layout.stacks(records)
    out = torch.empty(len(pairs), layout.hidden)
    tokens, ids = pairs[:, 0].long(), pairs[:, 1]
    x = x.bfloat16() if rounded else x
    for index in sorted(set(ids.tolist())):
        chosen = (ids == index).nonzero().flatten()
        bias = [None if stack.bias is None else stack.bias[index].float() for stack in (first, second)]
        gate_up = linear_reference(x[tokens[chosen]].float(), first.expert(index, torch.float32).float(), bias[0])
        h = silu_and_mul_reference(gate_up) if layout.limit is None else clamped_swiglu_reference(gate_up, layout.limit)
        h = h.bfloat16().float() if rounded else h
        out[chosen] = linear_reference(h, second.expert(index, torch.float32).float(), bias[1])
    return out


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Reader:
    """A thread that reads the queue if there is no native library."""

    def __init__(self, experts: HostExperts, queue: HostExpertQueue) -> None:
        self._experts, self._queue = experts, queue
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._read, name="host-experts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _read(self) -> None:
        header = self._queue.header
        answered = int(header[DONE])
        while not self._stopping.is_set():
            if (posted := int(header[POSTED])) == answered:
                time.sleep(NAP)
                continue
            try:
                self._answer(int(header[LAYER]), int(header[COUNT]), int(header[TOKENS]))
            except (IndexError, RuntimeError):
                header[FAILED] = REFUSED
            answered = posted
            header[DONE] = answered

    def _answer(self, layer: int, count: int, tokens: int) -> None:
        rows = self._experts.run(layer, self._queue.x[:tokens], self._queue.pairs[:count])
        self._queue.out[:count] = rows
