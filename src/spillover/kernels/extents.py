"""How the kernels cut their work and what room that takes. Plain arithmetic: the planner counts with it."""

from __future__ import annotations

SPLIT = 256  # positions that attention.cpp sums up before it merges; kSplit there
MOST_SCORES = 1 << 23  # most scores of an offloaded prefix that the reference makes at a time
# Positions of a segment. On a CPU it stays in the cache between its copy and its use; a CUDA device wants large copies.
SEGMENT_POSITIONS = {"cpu": 1024, "cuda": 4096}
SEGMENTS = 2  # one is attended while the next is copied
CODE_BLOCK = 32  # columns of a weight in codes that are multiplied together
CODE_PANEL = 32  # channels of such a weight that lie together
# A CUDA device dequantises a layer's experts once, instead of in every tile of rows that meets them, where a step has
# WIDE_TOKENS or more and an expert WIDE_ROWS or more of them on average, and all of them take at most WIDE_BYTES.
WIDE_TOKENS = 1024
WIDE_ROWS = 256
WIDE_BYTES = 2 << 30
EXPERT_ROW = 128  # of activations beside experts in codes: rows are padded to a multiple of it
# Products whose sums have one order: channels of a matrix that need no chunks to keep a device busy; chunks of the
# others; how long a chunk is at least, and a multiple of what; rows up to which a chunk may have programs of its own.
WIDE_CHANNELS = 16384
CHUNKS = 4
SHORTEST_CHUNK = 256
CHUNK_UNIT = 128
SPREAD_ROWS = 512
MOST_RANKS = 8  # that CUDA devices meet with


def dequantizes(experts: int, k: int, expert_bytes: int, tokens: int) -> bool:
    """Return whether a step dequantises its experts first. `expert_bytes`: of one that is dequantised."""
    return (tokens >= WIDE_TOKENS and tokens * k >= WIDE_ROWS * experts and experts * expert_bytes <= WIDE_BYTES)


def split_blocks(block_size: int) -> int:
    """Return the blocks that the native kernel sums up before it merges: a sequence may be cut at multiples."""
    return max(1, SPLIT // block_size)


def segment_blocks(block_size: int, device: str) -> int:
    split = split_blocks(block_size)
    return max(1, SEGMENT_POSITIONS[device] // (split * block_size)) * split


def product_chunks(channels: int, inner: int) -> tuple[int, int]:
    """Return how many chunks the inner dimension of a matrix is summed in, one or four, and their length. A constant of
    the matrix: another number changes the bits of every product with it."""
    chunks = CHUNKS if channels < WIDE_CHANNELS and inner >= CHUNKS * SHORTEST_CHUNK else 1
    return chunks, -(-inner // (chunks * CHUNK_UNIT)) * CHUNK_UNIT


def chunk_sums_bytes(rows: int, channels: int, inner: int) -> int:
    """Return the bytes of chunks' sums, where each chunk has programs of its own."""
    chunks, _ = product_chunks(channels, inner)
    tiled = -(-min(rows, SPREAD_ROWS) // 128) * 128, -(-channels // 128) * 128
    return 4 * chunks * tiled[0] * tiled[1] if chunks > 1 else 0


def num_passes(pairs: int, experts: int, quota: int, transit: int) -> int:
    """Return the passes of a step of n (token, expert) pairs over a layer with `quota` slots: the first goes over the
    layer's slots and all of transit, each other over transit alone. Counts on half of the slots: others may be lent."""
    over = min(pairs, experts) - (quota - quota // 2)
    return max(1, -(-over // transit)) if transit else 1
