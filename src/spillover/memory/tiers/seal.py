"""Seals of stored records: a checksum, or with a key a MAC that only holders of the key can compute.

A checksum detects damage by disks, memory and incomplete writes. But anyone who can write to a store can compute it
too, and so control what a server answers; with a key, forged records are rejected like damaged ones.
"""

from __future__ import annotations

import logging
import os
from hashlib import blake2b
from pathlib import Path

from spillover.errors import SpilloverError
from spillover.memory.tiers.base import checksum

log = logging.getLogger("spillover.memory")

LEAST_KEY_BYTES = 16
MOST_KEY_BYTES = 1024
_DIGEST_BYTES = 32


class Seal:
    """A checksum of records without a key: xxh3."""

    magic = b"SPILLKV1"
    nbytes = 8

    def identity(self, identity: bytes) -> bytes:
        """Return the identity of a cache with this seal: caches with and without a key never share records."""
        return identity

    def of_payload(self, payload: bytes | memoryview) -> bytes:
        return checksum(payload).to_bytes(8, "little")

    def of_header(self, header: bytes) -> bytes:
        return checksum(header).to_bytes(8, "little")


class KeyedSeal(Seal):
    """A seal with a key: BLAKE2b, about 1 GB/s per core."""

    magic = b"SPILLKM1"
    nbytes = _DIGEST_BYTES

    def __init__(self, secret: bytes) -> None:
        self._key = blake2b(secret, digest_size=64, person=b"spillover kv").digest()

    def identity(self, identity: bytes) -> bytes:
        return self._mac(identity, b"identity")

    def of_payload(self, payload: bytes | memoryview) -> bytes:
        return self._mac(payload, b"payload")

    def of_header(self, header: bytes) -> bytes:
        return self._mac(header, b"header")

    def _mac(self, data: bytes | memoryview, what: bytes) -> bytes:
        return blake2b(data, digest_size=_DIGEST_BYTES, key=self._key, person=what).digest()


PLAIN = Seal()


def read_seal(key_file: str | None) -> Seal:
    """Return the seal for `--kv-store-key-file`. The key is the file's bytes, with surrounding white space stripped."""
    if key_file is None:
        return PLAIN
    path = Path(key_file).expanduser()
    try:
        with path.open("rb") as file:
            secret = file.read(MOST_KEY_BYTES + 2).strip()
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise SpilloverError(f"--kv-store-key-file {path} cannot be read: {error.strerror or error}") from None
    if not LEAST_KEY_BYTES <= len(secret) <= MOST_KEY_BYTES:
        raise SpilloverError(f"--kv-store-key-file {path} holds {min(len(secret), MOST_KEY_BYTES + 1)} bytes, and a "
                             f"key has {LEAST_KEY_BYTES} to {MOST_KEY_BYTES}; make one with `openssl rand -hex 32`")
    if mode & 0o007:
        log.warning("--kv-store-key-file %s can be read by other users; type `chmod 600 %s`", path, path)
    return KeyedSeal(secret)
