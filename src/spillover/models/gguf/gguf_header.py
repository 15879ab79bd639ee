"""The header of a GGUF file: its metadata and the location of each tensor. Reads no tensor data.

The gguf package's own reader makes several array objects for every vocabulary entry, which takes seconds, and a model
is opened twice (weights and tokenizer). So the header is parsed here; formats and dequantisation are the package's.
"""

from __future__ import annotations

import math
import mmap
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)

from spillover.errors import CheckpointError, short_repr
from spillover.models.config import named

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_FILES = 99_999  # maximum number of split files: their names have five digits
MOST_ALIGNMENT = 1 << 20
MOST_DEPTH = 4  # maximum nesting of arrays
_SCALARS = {
    GGUFValueType.UINT8: "B", GGUFValueType.INT8: "b", GGUFValueType.UINT16: "H", GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I", GGUFValueType.INT32: "i", GGUFValueType.FLOAT32: "f", GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q", GGUFValueType.INT64: "q", GGUFValueType.FLOAT64: "d",
}
_LENGTH = struct.Struct("<Q")
_ARRAYS = "BbHhIifQqd"  # struct codes that the array module has too, with the same sizes


@dataclass(frozen=True)
class GGUFTensor:
    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # slowest dimension first, as in torch
    file: Path
    offset: int  # bytes from the start of the file

    @property
    def row_nbytes(self) -> int:
        block, block_nbytes = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * block_nbytes

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_nbytes


@dataclass(frozen=True)
class GGUFHeader:
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


# Headers by file, inode, size and time; None: none are kept.
_kept: ContextVar[dict[tuple[str, int, int, int], GGUFHeader] | None] = ContextVar("kept headers", default=None)


def read_header(path: Path) -> GGUFHeader:
    """Return the header of `path`; if it is the first of several split files, with the tensors of all of them."""
    header = _read_one(path)
    count = header.metadata.get("split.count", 0)
    if type(count) is not int or not 0 <= count <= MOST_FILES:
        raise CheckpointError(f"{path}: split.count is {short_repr(count)}; it can be 0 to {MOST_FILES:,}")
    if count <= 1:
        return header
    ending = f"-00001-of-{count:05d}.gguf"
    if not path.name.endswith(ending):
        raise CheckpointError(f"{path} is one of {count} split files; give the first one, which ends in {ending}")
    tensors = dict(header.tensors)
    for part in range(2, count + 1):
        sibling = path.with_name(path.name.removesuffix(ending) + f"-{part:05d}-of-{count:05d}.gguf")
        if not sibling.is_file():
            raise CheckpointError(f"{path.parent} lacks {sibling.name}, one of the {count} files of this model")
        tensors |= _read_one(sibling).tensors
    return GGUFHeader(header.metadata, tensors)


@contextmanager
def headers_kept() -> Iterator[None]:
    """Parse each file's header once within this context, as a start opens a file several times. They are dropped at its
    end, since large vocabularies take tens of megabytes."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def _read_one(path: Path) -> GGUFHeader:
    kept = _kept.get()
    try:
        state = path.stat()
        key = str(path), state.st_ino, state.st_size, state.st_mtime_ns
        if kept is None:
            return _parse_file(path)
        if key not in kept:
            kept[key] = _parse_file(path)
        return kept[key]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error


def _parse_file(path: Path) -> GGUFHeader:
    try:
        with path.open("rb") as stream:
            size = path.stat().st_size
            if stream.read(4) != MAGIC:
                raise CheckpointError(f"{path} is not a GGUF file (it does not begin with GGUF)")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _parse(_Cursor(content, path, size), path, size)
    except (ValueError, KeyError, OverflowError, MemoryError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path} has a corrupt GGUF header ({error})") from error


def _parse(cursor: _Cursor, path: Path, size: int) -> GGUFHeader:
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise CheckpointError(f"{path} is GGUF version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} are "
                              "supported, in little-endian order")
    tensor_count, field_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(field_count):
        key = cursor.string()
        metadata[key] = cursor.value(GGUFValueType(cursor.scalar("I")))
    infos = []
    for _ in range(tensor_count):
        name = cursor.string()
        dimensions = cursor.scalar("I")
        if not 1 <= dimensions <= 4:
            raise ValueError(f"tensor {named(name)} has {dimensions} dimensions")
        shape = tuple(reversed([cursor.scalar("Q") for _ in range(dimensions)]))
        if 0 in shape:
            raise ValueError(f"tensor {named(name)} has shape {list(shape)}")
        infos.append((name, GGMLQuantizationType(cursor.scalar("I")), shape, cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {short_repr(alignment)}, not a power of two")
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: GGUFTensor(name, kind, shape, path, start + offset) for name, kind, shape, offset in infos}
    for tensor in tensors.values():
        if tensor.shape[-1] % GGML_QUANT_SIZES[tensor.kind][0]:
            raise ValueError(f"tensor {named(tensor.name)} has rows of {tensor.shape[-1]}, not of whole "
                             f"{tensor.kind.name} blocks")
        if tensor.offset + tensor.nbytes > size:
            raise CheckpointError(f"{path} is truncated: tensor {named(tensor.name)} ends at byte "
                                  f"{tensor.offset + tensor.nbytes:,} and the file has {size:,}; download it again")
    return GGUFHeader(metadata, tensors)


class _Cursor:
    """A sequential reader of header values; a length that exceeds the file is refused."""

    def __init__(self, content: mmap.mmap, path: Path, size: int) -> None:
        self._content, self._path, self._size = content, path, size
        self.position = len(MAGIC)

    def take(self, count: int) -> bytes:
        start = self.position
        self.position += count
        if self.position > self._size:
            raise self._truncated()
        return self._content[start:self.position]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", errors="replace")

    def strings(self, count: int) -> list[str]:
        """Read `count` strings; faster than calling `string`, as a vocabulary has hundreds of thousands."""
        content, size, start, found = self._content, self._size, self.position, []
        for _ in range(count):
            if start + 8 > size:
                raise self._truncated()
            end = start + 8 + _LENGTH.unpack_from(content, start)[0]
            if end > size:
                raise self._truncated()
            found.append(content[start + 8:end])
            start = end
        self.position = start
        return [text.decode("utf-8", errors="replace") for text in found]

    def _truncated(self) -> CheckpointError:
        return CheckpointError(f"{self._path} is truncated or corrupt: its header runs past its {self._size:,} bytes; "
                               "download it again")

    def value(self, kind: GGUFValueType, depth: int = 0) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self.scalar(_SCALARS[kind])
        if depth > MOST_DEPTH:
            raise ValueError(f"arrays are nested more than {MOST_DEPTH} deep")
        item, count = GGUFValueType(self.scalar("I")), self.scalar("Q")
        code = _SCALARS.get(item, "")
        if code and code in _ARRAYS:
            numbers = array(code, self.take(count * struct.calcsize("<" + code)))
            return numbers.tolist()
        if count > self._size:
            raise ValueError(f"an array of {count} entries")
        if item == GGUFValueType.STRING:
            return self.strings(count)
        return [self.value(item, depth + 1) for _ in range(count)]
