"""Names of blocks outside the process: stable chained digests, the same on every machine and after a restart.

Identity (model, dtype and layout) and salt enter the root's digest and, through the chain, every block's digest.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

DIGEST_BYTES = 32
TOKEN_BYTES = 4


def packed(tokens: Sequence[int]) -> bytes:
    """Return token ids as little-endian int32, in which blocks are compared and digested; fast if given an array."""
    return (tokens if isinstance(tokens, array) else array("i", tokens)).tobytes()


def root_digest(identity: bytes, salt: str | None) -> bytes:
    # The length and the flag distinguish (identity, salt) pairs whose concatenations are the same bytes.
    salted = b"\0" if salt is None else b"\1" + salt.encode()
    return blake2b(len(identity).to_bytes(8, "little") + identity + salted, digest_size=DIGEST_BYTES).digest()


def block_digest(parent: bytes, span: bytes) -> bytes:
    """Return the digest of one block of packed tokens that follows the block (or root) with digest `parent`."""
    return blake2b(parent + span, digest_size=DIGEST_BYTES).digest()


def block_key(digest: bytes, group: int) -> bytes:
    """Return the key of one layer group's block with this digest."""
    return digest + bytes((group,))


def prefix_keys(tokens: Sequence[int], block_size: int, digest: bytes, groups: int = 1) -> Iterator[bytes]:
    """Yield the key of each layer group's block for each full block of `tokens`, which follow the block (or root) with
    this digest."""
    data, width, suffixes = packed(tokens), block_size * TOKEN_BYTES, [bytes((group,)) for group in range(groups)]
    for end in range(width, len(data) + 1, width):
        digest = block_digest(digest, data[end - width : end])
        for suffix in suffixes:
            yield digest + suffix
