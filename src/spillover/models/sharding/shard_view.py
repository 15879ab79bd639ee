"""A view of a checkpoint for one rank of a sharded model: every tensor is the rank's part of the whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spillover.kernels.extents import CODE_BLOCK
from spillover.kernels.formats.gguf_codes import Codes
from spillover.models.checkpoint import Checkpoint
from spillover.models.sharding.shard import Cut, Cuts, Ranges

_Dims = list[Ranges | None]


class ShardView(Checkpoint):
    """The rank's part of a checkpoint. A tensor whose shape is not as expected is returned uncut, for the reader to
    refuse it."""

    def __init__(self, checkpoint: Checkpoint, cuts: Cuts) -> None:
        self.path: Path = checkpoint.path
        self.config: dict[str, Any] = checkpoint.config
        self._source = checkpoint
        self._cuts = cuts
        names = checkpoint.names()
        self._names = {name for name in names | set(cuts) if self._stored(name) in names}

    def names(self) -> set[str]:
        return set(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        whole = tuple(self._source.shape(self._found(name)))
        dims = self._dims(name)
        if dims is None:
            return whole
        return tuple(size if ranges is None else sum(stop - start for start, stop in ranges)
                     for size, ranges in zip(whole, dims, strict=True))

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._found(name))

    def file(self, name: str) -> Path:
        return self._source.file(self._found(name))

    def read(self, name: str, row: int | None = None) -> Tensor:
        return self.read_part(name, () if row is None else (row,))

    def read_part(self, name: str, index: tuple[slice | int, ...]) -> Tensor:
        dims = self._dims(name)
        if dims is None:
            found = self._found(name)
            return self._source.read_part(found, index) if index else self._source.read(found)
        row = index[0] if index else None
        if len(index) > 1 or not isinstance(row, int | None):
            return self.read_part(name, ())[index].clone()
        first: slice | int = _slice(dims[0])
        if row is not None:
            first = row if dims[0] is None else _nth(dims[0], row)
            dims = [((0, 0),), *dims[1:]]
        several = next((dim for dim, ranges in enumerate(dims) if ranges is not None and len(ranges) > 1), None)
        rest = [_slice(ranges) for ranges in dims[1:]]
        if several is None:
            return self._source.read_part(self._found(name), (first, *rest))
        ranges = dims[several]
        assert ranges is not None
        parts = []
        for start, stop in ranges:
            place: list[slice | int] = [first, *rest]
            place[several] = slice(start, stop)
            parts.append(self._source.read_part(self._found(name), tuple(place)))
        return torch.cat(parts, dim=several - (row is not None))

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> Codes:
        found, dims = self._found(name), self._dims(name)
        own, columns = dims if dims is not None else (None, None)
        if own is not None:
            assert rows is None, "a part of a part"
            (rows,) = own  # one range, as a tensor in codes never has two matrices
        codes = self._source.read_codes(found, rows)
        if columns is None:
            return codes
        ((start, stop),) = columns

        def cut(part: Tensor, unit: int) -> Tensor:
            return part[:, start // unit : stop // unit].contiguous()

        return Codes(codes.form, cut(codes.values, 1), tuple(cut(part, CODE_BLOCK) for part in codes.block),
                     tuple(cut(part, codes.form.unit) for part in codes.head))

    def close(self) -> None:
        self._source.close()

    def _stored(self, name: str) -> str | None:
        """Return a tensor's name in the checkpoint; None if it is hidden from the rank."""
        if name not in self._cuts:
            return name
        cut = self._cuts[name]
        return None if cut is None else cut.name

    def _found(self, name: str) -> str:
        return self._stored(name) or name

    def _dims(self, name: str) -> _Dims | None:
        """Return the ranges of a tensor, by the dimensions that it has in the checkpoint; None if it is not cut."""
        cut = self._cuts.get(name)
        if cut is None:
            return None
        return _aligned(cut, tuple(self._source.shape(cut.name)))


def open_shard(checkpoint: Checkpoint, cuts: Cuts) -> Checkpoint:
    """Return a rank's view of a checkpoint; the checkpoint itself if nothing is cut."""
    return ShardView(checkpoint, cuts) if cuts else checkpoint


def _aligned(cut: Cut, shape: tuple[int, ...]) -> _Dims | None:
    """Match the dimensions of a cut with those in a file, which may have more or fewer dimensions of size 1."""
    if shape == cut.full_shape:
        dims: _Dims = list(cut.ranges)
    else:
        expected = [(size, ranges) for size, ranges in zip(cut.full_shape, cut.ranges, strict=True) if size != 1]
        if [size for size, _ in expected] != [size for size in shape if size != 1]:
            return None
        left = iter(expected)
        dims = [None if size == 1 else next(left)[1] for size in shape]
    return None if all(ranges is None for ranges in dims) else dims


def _slice(ranges: Ranges | None) -> slice:
    return slice(None) if ranges is None else slice(*ranges[0])


def _nth(ranges: Ranges, index: int) -> int:
    """Return the element at `index` of the concatenated ranges."""
    for start, stop in ranges:
        if index < stop - start:
            return start + index
        index -= stop - start
    raise IndexError(index)
