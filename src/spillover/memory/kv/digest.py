"""Block identity that may leave the process: a stable chained digest, the same on every machine and after a restart.

Identity (model, dtype and layout) and salt enter at the root and so, through the chain, every block's digest.
"""

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b

DIGEST_BYTES = 32


def root_digest(identity: bytes, salt: str | None) -> bytes:
    # The length and the flag keep (identity, salt) pairs apart that would concatenate to the same bytes.
    salted = b"\0" if salt is None else b"\1" + salt.encode()
    return blake2b(len(identity).to_bytes(8, "little") + identity + salted, digest_size=DIGEST_BYTES).digest()


def block_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the digest of one block of tokens that follows the block (or root) with digest `parent`."""
    return blake2b(parent + struct.pack(f"<{len(tokens)}i", *tokens), digest_size=DIGEST_BYTES).digest()


def block_key(digest: bytes, group: int) -> bytes:
    """Return the name of one layer group's block of those tokens."""
    return digest + bytes((group,))


def prefix_digests(tokens: Sequence[int], block_size: int, digest: bytes) -> Iterator[bytes]:
    """Yield one digest for each full block of `tokens`, which follow the block (or root) with this digest."""
    for end in range(block_size, len(tokens) + 1, block_size):
        digest = block_digest(digest, tokens[end - block_size : end])
        yield digest
