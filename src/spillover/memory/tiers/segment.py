"""A segment: one file with a fixed number of slots for records of one cache.

    page 0        title of the file: identity, payload bytes, number of slots
    then          one header of 256 bytes per slot, so that a scan reads one small piece of each file
    then          the payloads, each aligned to 4096 bytes

A write zeroes the slot's header, then writes the payload, then the new header. Whenever the process is killed, the slot
has the old record, none, or the new one; an incomplete write after a power failure fails the payload's checksum.
"""

import errno
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

from spillover.memory.tiers.base import CorruptRecordError, checksum
from spillover.memory.tiers.record import EMPTY_HEADER, HEADER_BYTES

PAGE = 4096
_TITLE = struct.Struct("<8sIQH64s")
_MAGIC = b"SPILLSG1"
MAX_IDENTITY_BYTES = 64
SUFFIX = ".kv"


def round_up(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def segment_size(slots: int, payload_bytes: int) -> int:
    """Return the size of the whole file in bytes, once its last slot has been written."""
    return PAGE + round_up(slots * HEADER_BYTES) + slots * round_up(payload_bytes)


class CutOffError(CorruptRecordError, OSError):
    """The file ends before the record does, because it was truncated externally. The slot can be written again."""


class Segment:
    """A file of slots. Its methods block; workers call them concurrently, each for a different slot."""

    def __init__(self, path: Path, identity: bytes, payload_bytes: int, slots: int) -> None:
        """Create a segment whose file is created by the first write. Use `Segment.open` for an existing file."""
        self.path = path
        self.identity = identity
        self.payload_bytes = payload_bytes
        self.slots = slots
        self.nbytes = segment_size(slots, payload_bytes)
        self._data_start = PAGE + round_up(slots * HEADER_BYTES)
        self._slot_bytes = round_up(payload_bytes)
        self._lock = threading.Lock()  # held while the file is created or opened
        self._file: int | None = None
        self._exists = False
        self._writable = True

    @classmethod
    def open(cls, path: Path, identity: bytes, writable: bool = True) -> "Segment | None":
        """Open a file; None if it is not a complete segment of this cache."""
        file = _open(path, writable)
        try:
            title = os.pread(file, _TITLE.size + 8, 0)
        finally:
            os.close(file)
        fields, check = title[: _TITLE.size], title[_TITLE.size :]
        if len(title) != _TITLE.size + 8 or int.from_bytes(check, "little") != checksum(fields):
            return None
        magic, slots, payload_bytes, identity_bytes, own = _TITLE.unpack(fields)
        if magic != _MAGIC or own[:identity_bytes] != identity or slots < 1 or payload_bytes < 1:
            return None
        segment = cls(path, identity, payload_bytes, slots)
        segment._exists = True
        segment._writable = writable
        return segment

    def raw_headers(self) -> list[bytes]:
        table = bytearray(self.slots * HEADER_BYTES)
        _read(self._open(), memoryview(table), PAGE)
        return [bytes(table[at : at + HEADER_BYTES]) for at in range(0, len(table), HEADER_BYTES)]

    def raw_header(self, slot: int) -> bytes:
        header = bytearray(HEADER_BYTES)
        _read(self._open(), memoryview(header), self.header_offset(slot))
        return bytes(header)

    def read(self, slot: int, payload: memoryview) -> None:
        """Read the payload of a slot without checks: the caller compares it with the header."""
        _read(self._open(), payload, self.payload_offset(slot))

    def write(self, slot: int, header: bytes, payload: memoryview) -> None:
        file = self._open(create=True)
        _write(file, EMPTY_HEADER, self.header_offset(slot))
        _write(file, payload, self.payload_offset(slot))
        _write(file, header, self.header_offset(slot))

    def erase(self, slots: Sequence[int] | None = None) -> None:
        """Erase the headers of these slots, or of all: they have no record from now on."""
        with self._lock:
            if not self._exists:
                return
        file = self._open()
        if slots is None:
            _write(file, bytes(self.slots * HEADER_BYTES), PAGE)
        else:
            for slot in slots:
                _write(file, EMPTY_HEADER, self.header_offset(slot))

    def shorten(self, slots: int) -> None:
        """Free the space of payloads after the first `slots`; those slots must have no records."""
        file = self._open()
        if os.fstat(file).st_size > self.end_of(slots):
            os.ftruncate(file, self.end_of(slots))

    def flip_bit(self, slot: int, bit: int) -> None:
        """Flip one bit of a stored payload, for tests of damage detection."""
        at = self.payload_offset(slot) + bit // 8 % self.payload_bytes
        byte = bytearray(1)
        _read(self._open(), memoryview(byte), at)
        byte[0] ^= 1 << bit % 8
        _write(self._open(), byte, at)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; no worker may use it any more, as its descriptor may be reused for another file at once."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def header_offset(self, slot: int) -> int:
        return PAGE + slot * HEADER_BYTES

    def payload_offset(self, slot: int) -> int:
        return self._data_start + slot * self._slot_bytes

    def end_of(self, slots: int) -> int:
        """Return the size of the file in bytes if the first `slots`, at least one, have been written, and no others."""
        return self.payload_offset(slots - 1) + self.payload_bytes

    def _open(self, create: bool = False) -> int:
        with self._lock:
            if self._file is None:
                try:
                    self._file = self._create() if create and not self._exists else _open(self.path, self._writable)
                except FileNotFoundError:  # the file was removed externally
                    if not create or not self._exists:
                        raise
                    self._file = self._create()
                self._exists = True
            return self._file

    def _create(self) -> int:
        """Create the file; refuse to follow a symbolic link, which could make it overwrite another file."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # the folder may have been removed
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            file = os.open(self.path.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            os.ftruncate(file, self._data_start)
            fields = _TITLE.pack(_MAGIC, self.slots, self.payload_bytes, len(self.identity), self.identity)
            _write(file, fields + checksum(fields).to_bytes(8, "little"), 0)
        except OSError:
            os.close(file)
            self.path.unlink(missing_ok=True)
            raise
        return file


def _open(path: Path, writable: bool) -> int:
    try:
        return os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)  # stored blocks can still be loaded


def _read(file: int, buffer: memoryview, offset: int) -> None:
    while buffer:
        count = os.preadv(file, [buffer], offset)
        if count == 0:
            raise CutOffError(errno.EIO, "the file ends too early")
        buffer, offset = buffer[count:], offset + count


def _write(file: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        try:
            count = os.pwritev(file, [rest], offset)
        except OSError as error:
            if error.errno == errno.EBADF:  # opened for reading only, see _open
                raise OSError(errno.EROFS, os.strerror(errno.EROFS)) from None
            raise
        if count == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rest, offset = rest[count:], offset + count
