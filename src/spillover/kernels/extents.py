"""How kernels divide their work, and the memory this takes. Plain arithmetic, so that the planner can use it."""

from __future__ import annotations

SPLIT = 256  # positions that attention.cpp sums up before it merges the sums; kSplit there
MOST_SCORES = 1 << 23  # maximum number of scores over an offloaded prefix that the reference computes at a time
# Positions of a segment. On a CPU a segment stays in the cache between its copy and its use; CUDA needs large copies.
SEGMENT_POSITIONS = {"cpu": 1024, "cuda": 4096}
SEGMENTS = 2  # number of segments of a stage: one is attended to while the next is copied
CODE_BLOCK = 32  # columns of a weight in codes that are multiplied together
EXPERT_SCRATCH_BYTES = 32 << 20  # maximum bytes of rows while a CPU computes all experts of a mixture at once
CODE_PANEL = 32  # channels of a weight in codes that are stored together
# A CUDA device dequantises a layer's experts once, instead of in every tile of rows that uses them, if a step has at
# least WIDE_TOKENS tokens, an expert WIDE_ROWS of them on average, and all experts dequantised at most WIDE_BYTES.
WIDE_TOKENS = 1024
WIDE_ROWS = 256
WIDE_BYTES = 2 << 30
EXPERT_ROW = 128  # with experts in codes, rows of activations are padded to a multiple of this
# Products whose sums have one fixed order, for any number of rows:
WIDE_CHANNELS = 16384  # a matrix with at least this many channels keeps a device busy without chunks
CHUNKS = 4  # number of chunks of the inner dimension of other matrices
SHORTEST_CHUNK = 256  # minimum length of a chunk
CHUNK_UNIT = 128  # the length of a chunk is a multiple of this
SPREAD_ROWS = 512  # maximum number of rows for which each chunk may have its own programs
MOST_RANKS = 8  # maximum number of ranks in a collective operation of CUDA devices


def dequantizes(experts: int, k: int, expert_bytes: int, tokens: int) -> bool:
    """Return whether a step dequantises its experts first. `expert_bytes`: bytes of one dequantised expert."""
    return (tokens >= WIDE_TOKENS and tokens * k >= WIDE_ROWS * experts and experts * expert_bytes <= WIDE_BYTES)


def split_blocks(block_size: int) -> int:
    """Return the blocks that the native kernel sums up before it merges: a sequence may be cut at multiples of them."""
    return max(1, SPLIT // block_size)


def segment_blocks(block_size: int, device: str) -> int:
    split = split_blocks(block_size)
    return max(1, SEGMENT_POSITIONS[device] // (split * block_size)) * split


def product_chunks(channels: int, inner: int) -> tuple[int, int]:
    """Return the number of chunks in which a matrix's inner dimension is summed, one or four, and their length:
    constants of the matrix, as other values would change the bits of every product with it."""
    chunks = CHUNKS if channels < WIDE_CHANNELS and inner >= CHUNKS * SHORTEST_CHUNK else 1
    return chunks, -(-inner // (chunks * CHUNK_UNIT)) * CHUNK_UNIT


def chunk_sums_bytes(rows: int, channels: int, inner: int) -> int:
    """Return the bytes that the sums of chunks take if each chunk has its own programs."""
    chunks, _ = product_chunks(channels, inner)
    tiled = -(-min(rows, SPREAD_ROWS) // 128) * 128, -(-channels // 128) * 128
    return 4 * chunks * tiled[0] * tiled[1] if chunks > 1 else 0


def num_passes(pairs: int, experts: int, quota: int, stream_buffers: int) -> int:
    """Return the passes of a step of `pairs` (token, expert) pairs over a layer with `quota` slots: the first uses the
    layer's slots and all stream buffers, the others the stream buffers alone. Assumes half of the slots: the rest may
    be lent."""
    over = min(pairs, experts) - (quota - quota // 2)
    return max(1, -(-over // stream_buffers)) if stream_buffers else 1
