"""The header that goes with every stored block: whose it is, how long, and what its bytes must add up to.

256 bytes, the same on disk and in a remote store. The header's own checksum also covers the identity of the cache
(model, dtype, layout), so that a record which has strayed into another cache is no record there.
"""

import struct
from dataclasses import dataclass

from spillover.memory.tiers.base import checksum

HEADER_BYTES = 256
MAX_KEY_BYTES = 206
_FIELDS = struct.Struct(f"<8sQQQdH{MAX_KEY_BYTES}s")
_CHECKSUM = struct.Struct("<Q")
_MAGIC = b"SPILLKV1"
EMPTY_HEADER = bytes(HEADER_BYTES)

assert _FIELDS.size + _CHECKSUM.size == HEADER_BYTES


@dataclass(frozen=True, slots=True)
class RecordHeader:
    key: bytes
    payload_bytes: int
    payload_checksum: int
    sequence: int  # later records of one cache have greater ones
    written: float  # seconds since 1970

    def pack(self, identity: bytes) -> bytes:
        assert 0 < len(self.key) <= MAX_KEY_BYTES, f"a key of {len(self.key)} bytes"
        fields = _FIELDS.pack(
            _MAGIC,
            self.sequence,
            self.payload_bytes,
            self.payload_checksum,
            self.written,
            len(self.key),
            self.key,
        )
        return fields + _CHECKSUM.pack(checksum(fields + identity))

    @classmethod
    def unpack(cls, data: bytes | memoryview, identity: bytes) -> "RecordHeader | None":
        """None where there is no whole header of this cache."""
        if len(data) != HEADER_BYTES or bytes(data[:8]) != _MAGIC:
            return None
        fields = bytes(data[: _FIELDS.size])
        if _CHECKSUM.unpack(data[_FIELDS.size :])[0] != checksum(fields + identity):
            return None
        _, sequence, payload_bytes, payload_checksum, written, key_bytes, key = _FIELDS.unpack(fields)
        return cls(key[:key_bytes], payload_bytes, payload_checksum, sequence, written)
