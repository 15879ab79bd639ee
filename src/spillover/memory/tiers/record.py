"""The header stored with every block: its key, and the length and seal of its payload.

It has 256 bytes, on disk and in a remote store alike. The header's own seal also covers the identity of the cache
(model, dtype, layout), so a record copied into another cache is not valid there.
"""

import hmac
import struct
from dataclasses import dataclass

from spillover.memory.tiers.seal import PLAIN, KeyedSeal, Seal

HEADER_BYTES = 256
MAX_KEY_BYTES = 206  # maximum length of a key if records are sealed by checksums; with a MAC it is 158
EMPTY_HEADER = bytes(HEADER_BYTES)


def _fields(seal_bytes: int) -> struct.Struct:
    """Return the header without its own seal: magic, sequence, payload length, payload seal, time, key length, key."""
    return struct.Struct(f"<8sQQ{seal_bytes}sdH{MAX_KEY_BYTES - 2 * (seal_bytes - PLAIN.nbytes)}s")


_FIELDS = {kind.magic: _fields(kind.nbytes) for kind in (Seal, KeyedSeal)}
assert all(_FIELDS[kind.magic].size + kind.nbytes == HEADER_BYTES for kind in (Seal, KeyedSeal))


@dataclass(frozen=True, slots=True)
class RecordHeader:
    key: bytes
    payload_bytes: int
    payload_seal: bytes
    sequence: int  # number of the record; later records of one cache have greater ones
    written: float  # time of writing in seconds since 1970

    def pack(self, identity: bytes, seal: Seal = PLAIN) -> bytes:
        fields = _FIELDS[seal.magic]
        assert 0 < len(self.key) <= fields.size - struct.calcsize(f"<8sQQ{seal.nbytes}sdH"), f"{len(self.key)} bytes"
        data = fields.pack(seal.magic, self.sequence, self.payload_bytes, self.payload_seal, self.written,
                           len(self.key), self.key)
        return data + seal.of_header(data + identity)

    @classmethod
    def unpack(cls, data: bytes | memoryview, identity: bytes, seal: Seal = PLAIN) -> "RecordHeader | None":
        """Parse a header; None if it is not a complete header of this cache with a valid seal of this kind."""
        if len(data) != HEADER_BYTES or bytes(data[:8]) != seal.magic:
            return None
        fields = bytes(data[: -seal.nbytes])
        if not hmac.compare_digest(bytes(data[-seal.nbytes :]), seal.of_header(fields + identity)):
            return None
        return cls._from(fields)

    @classmethod
    def read(cls, data: bytes, identity: bytes) -> "RecordHeader | None":
        """Parse a header without the key of its seal: a header with a MAC is not verified, any other is."""
        if is_keyed(data):
            return cls._from(data[: -KeyedSeal.nbytes])
        return cls.unpack(data, identity)

    @classmethod
    def _from(cls, fields: bytes) -> "RecordHeader":
        _, sequence, payload_bytes, payload_seal, written, key_bytes, key = _FIELDS[fields[:8]].unpack(fields)
        return cls(key[:key_bytes], payload_bytes, payload_seal, sequence, written)


def is_keyed(data: bytes) -> bool:
    return len(data) == HEADER_BYTES and data[:8] == KeyedSeal.magic
