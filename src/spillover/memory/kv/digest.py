"""Block identity that may leave the process: a stable chained digest, the same on every machine and after a restart.

Identity (model, dtype and layout) and salt enter at the root and so, through the chain, every block's digest.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

DIGEST_BYTES = 32
TOKEN_BYTES = 4


def packed(tokens: Sequence[int]) -> bytes:
    """Return token ids as little-endian int32, the form in which blocks are compared and digested; fast of an array."""
    return (tokens if isinstance(tokens, array) else array("i", tokens)).tobytes()


def root_digest(identity: bytes, salt: str | None) -> bytes:
    # The length and the flag keep (identity, salt) pairs apart that would concatenate to the same bytes.
    salted = b"\0" if salt is None else b"\1" + salt.encode()
    return blake2b(len(identity).to_bytes(8, "little") + identity + salted, digest_size=DIGEST_BYTES).digest()


def block_digest(parent: bytes, span: bytes) -> bytes:
    """Return the digest of one block of packed tokens that follows the block (or root) with digest `parent`."""
    return blake2b(parent + span, digest_size=DIGEST_BYTES).digest()


def block_key(digest: bytes, group: int) -> bytes:
    """Return the name of one layer group's block of those tokens."""
    return digest + bytes((group,))


def prefix_keys(tokens: Sequence[int], block_size: int, digest: bytes, groups: int = 1) -> Iterator[bytes]:
    """Yield the name of each layer group's block for each full block of `tokens`, which follow the block (or root) with
    this digest."""
    data, width, suffixes = packed(tokens), block_size * TOKEN_BYTES, [bytes((group,)) for group in range(groups)]
    for end in range(width, len(data) + 1, width):
        digest = block_digest(digest, data[end - width : end])
        for suffix in suffixes:
            yield digest + suffix
