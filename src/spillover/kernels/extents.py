"""How the kernels cut their work and what room that takes. Plain arithmetic: the planner counts with it."""

from __future__ import annotations

SPLIT = 256  # positions that attention.cpp sums up before it merges; kSplit there
MOST_SCORES = 1 << 23  # most scores of an offloaded prefix that the reference makes at a time
# Positions of a segment. On a CPU it stays in the cache between its copy and its use; a CUDA device wants large copies.
SEGMENT_POSITIONS = {"cpu": 1024, "cuda": 4096}
SEGMENTS = 2  # one is attended while the next is copied
CODE_BLOCK = 32  # columns of a weight in codes that share a scale and an offset
CODE_PANEL = 32  # channels of such a weight that lie together
CODE_BYTES = {4: 640, 8: 1088}  # of a block of a panel, by bits of a code
# A CUDA device dequantises a layer's experts once, instead of in every tile of rows that meets them, where a step has
# so many tokens and an expert so many rows on average that this is faster, and all of them take no more than this.
WIDE_TOKENS = 1024
WIDE_ROWS = 256
WIDE_BYTES = 2 << 30


def dequantizes(experts: int, k: int, expert_bytes: int, tokens: int) -> bool:
    """Return whether a step dequantises its experts first. `expert_bytes`: of one that is dequantised."""
    return (tokens >= WIDE_TOKENS and tokens * k >= WIDE_ROWS * experts and experts * expert_bytes <= WIDE_BYTES)


def split_blocks(block_size: int) -> int:
    """Return the blocks that the native kernel sums up before it merges: a sequence may be cut at multiples."""
    return max(1, SPLIT // block_size)


def segment_blocks(block_size: int, device: str) -> int:
    split = split_blocks(block_size)
    return max(1, SEGMENT_POSITIONS[device] // (split * block_size)) * split
