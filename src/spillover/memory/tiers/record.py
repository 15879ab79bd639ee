"""The header that goes with every stored block: whose it is, how long, and what its bytes must add up to.

256 bytes, the same on disk and in a remote store. The header's own seal also covers the identity of the cache (model,
dtype, layout), so that a record which has strayed into another cache is no record there.
"""

import hmac
import struct
from dataclasses import dataclass

from spillover.memory.tiers.seal import PLAIN, KeyedSeal, Seal

HEADER_BYTES = 256
MAX_KEY_BYTES = 206  # where records are sealed by checksums; with a MAC 158
EMPTY_HEADER = bytes(HEADER_BYTES)


def _fields(seal_bytes: int) -> struct.Struct:
    """Return all but the header's own seal: magic, sequence, length and seal of the payload, time, key length, key."""
    return struct.Struct(f"<8sQQ{seal_bytes}sdH{MAX_KEY_BYTES - 2 * (seal_bytes - PLAIN.nbytes)}s")


_FIELDS = {kind.magic: _fields(kind.nbytes) for kind in (Seal, KeyedSeal)}
assert all(_FIELDS[kind.magic].size + kind.nbytes == HEADER_BYTES for kind in (Seal, KeyedSeal))


@dataclass(frozen=True, slots=True)
class RecordHeader:
    key: bytes
    payload_bytes: int
    payload_seal: bytes
    sequence: int  # later records of one cache have greater ones
    written: float  # seconds since 1970

    def pack(self, identity: bytes, seal: Seal = PLAIN) -> bytes:
        fields = _FIELDS[seal.magic]
        assert 0 < len(self.key) <= fields.size - struct.calcsize(f"<8sQQ{seal.nbytes}sdH"), f"{len(self.key)} bytes"
        data = fields.pack(seal.magic, self.sequence, self.payload_bytes, self.payload_seal, self.written,
                           len(self.key), self.key)
        return data + seal.of_header(data + identity)

    @classmethod
    def unpack(cls, data: bytes | memoryview, identity: bytes, seal: Seal = PLAIN) -> "RecordHeader | None":
        """Parse a header; None where there is no whole header of this cache, sealed like this."""
        if len(data) != HEADER_BYTES or bytes(data[:8]) != seal.magic:
            return None
        fields = bytes(data[: -seal.nbytes])
        if not hmac.compare_digest(bytes(data[-seal.nbytes :]), seal.of_header(fields + identity)):
            return None
        return cls._from(fields)

    @classmethod
    def read(cls, data: bytes, identity: bytes) -> "RecordHeader | None":
        """Return what can be told without a key: of a record with a MAC all, unchecked."""
        if is_keyed(data):
            return cls._from(data[: -KeyedSeal.nbytes])
        return cls.unpack(data, identity)

    @classmethod
    def _from(cls, fields: bytes) -> "RecordHeader":
        _, sequence, payload_bytes, payload_seal, written, key_bytes, key = _FIELDS[fields[:8]].unpack(fields)
        return cls(key[:key_bytes], payload_bytes, payload_seal, sequence, written)


def is_keyed(data: bytes) -> bool:
    return len(data) == HEADER_BYTES and data[:8] == KeyedSeal.magic
