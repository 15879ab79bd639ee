"""The order of codes in a file's blocks and in panels. The native versions are in native/coded/pack.cpp; those in torch
define them, and are used where there are no native kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spillover.kernels import native
from spillover.kernels.extents import CODE_BLOCK, CODE_PANEL

_HALF = CODE_PANEL // 2  # channels of half a panel
_CHUNK = 128 * CODE_PANEL  # number of rows that torch packs at a time


class PanelLayout(NamedTuple):
    """The layout of panels: units, each of them a head and then blocks, which are numbers and then codes."""

    bits: int
    block: tuple[int, ...]  # bytes of each of a block's numbers
    head: tuple[int, ...]  # bytes of each of a head's numbers
    blocks: int  # of a unit

    @property
    def head_bytes(self) -> int:
        return CODE_PANEL * sum(self.head)

    @property
    def block_bytes(self) -> int:
        return CODE_PANEL * (sum(self.block) + CODE_BLOCK * self.bits // 8)

    @property
    def unit_bytes(self) -> int:
        return self.head_bytes + self.blocks * self.block_bytes


class _Places(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("panel_bytes", "per_unit", "unit_bytes", "first", "step")]


def unpack_fields(stored: Tensor, width: int, step: int, above: Tensor | None = None) -> Tensor:
    """Unpack bytes [rows, blocks, bytes] to fields of `width` bits [rows, blocks, fields]: of every `step` bytes first
    the lowest bits. `above`: add them as the bits above the lowest four of these, and return these."""
    library = native.library()
    count = stored.shape[0] * stored.shape[1]
    regular = stored.stride(2) == 1 and stored.stride(0) == stored.shape[1] * stored.stride(1)
    if library is None or not regular or (width == 4 and above is not None):
        shifts = torch.arange(0, 8, width, dtype=torch.uint8).view(-1, 1)
        groups = stored.reshape(*stored.shape[:-1], -1, 1, step)
        found = (groups >> shifts & (1 << width) - 1).flatten(-3)
        return found if above is None else above.bitwise_or_(found << 4)
    fields = stored.shape[-1] * 8 // width
    made = torch.empty(*stored.shape[:-1], fields, dtype=torch.uint8) if above is None else above
    library.unpack_fields(stored.data_ptr(), count, stored.stride(1), stored.shape[-1], width, step, made.data_ptr(),
                          above is not None)
    return made


def pack_rows(values: Tensor, block: Sequence[Tensor], head: Sequence[Tensor], layout: PanelLayout, panels: Tensor,
              first: int = 0) -> None:
    """Write the rows of a weight into panels [panels, bytes], as channels from `first` on: codes [rows, columns], and
    numbers [rows, blocks] and [rows, units]. Channels past the last row must be zero before."""
    library = native.library()
    if library is None:
        _pack_in_torch(values, block, head, layout, panels, first)
        return
    rows, columns = values.shape
    each = panels.shape[1], layout.blocks, layout.unit_bytes

    def numbers(part: Tensor, places: _Places) -> None:
        part = part.contiguous()
        library.pack_numbers(part.data_ptr(), rows, part.shape[1], part.itemsize, first, panels.data_ptr(),
                             ctypes.byref(places))

    start = 0
    for part in head:
        numbers(part, _Places(each[0], 1, layout.unit_bytes, start, 0))
        start += CODE_PANEL * part.itemsize
    for part in block:
        numbers(part, _Places(*each, start, layout.block_bytes))
        start += CODE_PANEL * part.itemsize
    values = values.contiguous()
    library.pack_codes(values.data_ptr(), rows, columns, layout.bits, first, panels.data_ptr(),
                       ctypes.byref(_Places(*each, start, layout.block_bytes)))


def _pack_in_torch(values: Tensor, block: Sequence[Tensor], head: Sequence[Tensor], layout: PanelLayout, panels: Tensor,
                   first: int) -> None:
    """Pack whole panels; where others have begun a panel, its earlier channels are packed with zeros and added."""
    rows, above = values.shape[0], first % CODE_PANEL
    for begin in range(-above, rows, _CHUNK):
        some = [_padded(part, begin, min(begin + _CHUNK, rows)) for part in (values, *block, *head)]
        count = some[0].shape[0] // CODE_PANEL
        units = values.shape[1] // CODE_BLOCK // layout.blocks

        def channels(part: Tensor, count: int = count, units: int = units) -> Tensor:
            """Reorder [channels, units or blocks] -> bytes [panels, units, blocks of a unit, bytes]."""
            ordered = part.reshape(count, CODE_PANEL, -1).transpose(1, 2).contiguous().view(torch.uint8)
            return ordered.view(count, units, -1, CODE_PANEL * part.itemsize)

        flat = vectors(some[0], layout.bits, count).view(count, units, layout.blocks, -1)
        inner = torch.cat([*map(channels, some[1 : 1 + len(block)]), flat], dim=-1).view(count, units, -1)
        made = torch.cat([*(channels(part).squeeze(2) for part in some[1 + len(block) :]), inner], dim=-1)
        panel = (first + begin) // CODE_PANEL
        target = panels[panel : panel + count]
        if begin < 0:
            made[0] |= target[0].view(made[0].shape)
        target.copy_(made.view(count, -1))


def _padded(part: Tensor, begin: int, end: int) -> Tensor:
    """Return rows from `begin` to `end`, with rows of zeros before 0 and after the end, up to whole panels."""
    whole = part.new_zeros(-(-(end - begin) // CODE_PANEL) * CODE_PANEL, part.shape[1])
    whole[max(0, -begin) : end - begin] = part[max(0, begin) : end]
    return whole


def vectors(values: Tensor, bits: int, count: int) -> Tensor:
    """Reorder values [channels, columns] to the layout of native/coded/coded.h: bytes [panels, blocks, bytes]."""
    if bits == 8:
        # half, channel, block, vector, place, parity
        words = values.view(torch.uint8).reshape(count, 2, _HALF, -1, 8, 2, 2)
        return words.permute(0, 3, 1, 4, 2, 6, 5).reshape(count, words.shape[3], -1)
    words = values.reshape(count, 2, _HALF, -1, 4, 2, 2, 2)  # half, channel, block, vector, byte, nibble, parity
    words = words.permute(0, 3, 1, 4, 6, 2, 7, 5)  # panel, block, half, vector, nibble, channel, parity, byte
    low = words & 15
    planes = [(low[:, :, :, :, 0] | low[:, :, :, :, 1] << 4).flatten(3)]
    if bits > 4:
        # vectors, codes of a byte, byte
        high = (words >> 4).reshape(count, words.shape[1], 2, bits - 4, 8 // (bits - 4), 64)
        shifts = torch.arange(0, 8, bits - 4, dtype=torch.uint8).view(-1, 1)
        planes.append((high << shifts).sum(4, dtype=torch.uint8).flatten(3))
    return torch.cat(planes, dim=-1).flatten(2)


def values_of(vectors: Tensor, bits: int, count: int) -> Tensor:
    """Reverse `vectors`."""
    if bits == 8:
        signed = vectors.contiguous().view(torch.int8).reshape(count, -1, 2, 8, _HALF, 2, 2)
        return signed.permute(0, 2, 4, 1, 3, 6, 5).reshape(count * CODE_PANEL, -1)
    planes = vectors.reshape(count, -1, 2, 64 * bits)
    low = planes[..., :256].reshape(*planes.shape[:3], 4, 1, _HALF, 2, 2)
    words = torch.cat((low & 15, low >> 4), dim=4)  # panel, block, half, vector, nibble, channel, parity, byte
    if bits > 4:
        high = planes[..., 256:].reshape(*planes.shape[:3], bits - 4, 1, 64)
        shifts = torch.arange(0, 8, bits - 4, dtype=torch.uint8).view(-1, 1)
        words = words | (high >> shifts & (1 << bits - 4) - 1).flatten(3).view(words.shape) << 4
    return words.permute(0, 2, 5, 1, 3, 7, 4, 6).reshape(count * CODE_PANEL, -1)
