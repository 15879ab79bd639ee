"""How attention's work is cut into programs. Plain arithmetic: the host does it for a step, the planner for its memory.

The sums of a single query are made piece by piece, and the pieces added in their order. Where a piece ends depends on
the sequence's own length alone, so the result does not depend on the batch; whether one program takes all pieces of a
sequence or each has a program of its own does, and changes no bit. Requests with more new tokens are cut into tiles of
queries.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PIECE = 128  # keys, while a sequence has at most MOST_PIECES of them
MOST_PIECES = 32  # then pieces grow, in multiples of PIECE
TILE = 64  # keys at a time of a single query; a window's first piece begins at a multiple of it
QUERIES = 128  # a tile of queries
BUSY = 264  # programs that keep a device busy; below that, sequences are split between programs
FIELDS = 8  # of an item


def max_splits(requests: int, longest: int) -> int:
    """Return the items of n sequences of up to `longest` tokens."""
    return requests * min(MOST_PIECES, -(-longest // PIECE))


def decode_splits(
    rows: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    seq_lens: npt.NDArray[np.int64],
    kv_heads: int,
    window: int | None,
) -> npt.NDArray[np.int32]:
    """Return [items, FIELDS] for requests with one new token each: the row of its query, its row of the block tables,
    its first key and the one past the last, the oldest key it sees, keys a piece, items of the request, its index."""
    oldest = np.zeros_like(seq_lens) if window is None else np.maximum(seq_lens - window, 0)
    origin = oldest // TILE * TILE
    span = seq_lens - origin
    size = PIECE * -(-span // (PIECE * MOST_PIECES))
    split = span > max(PIECE, span.sum() * kv_heads // BUSY)
    parts = np.where(split, -(-span // size), 1)
    order = np.argsort(-np.where(split, size, span), kind="stable")  # the longest first, so that the end is even
    chosen = np.repeat(order, parts[order])
    part = np.arange(len(chosen)) - np.repeat(np.cumsum(parts[order]) - parts[order], parts[order])
    begin = origin[chosen] + part * size[chosen]
    end = np.where(split[chosen], np.minimum(begin + size[chosen], seq_lens[chosen]), seq_lens[chosen])
    fields = (rows[chosen], slots[chosen], begin, end, oldest[chosen], size[chosen], parts[chosen], part)
    return np.stack(fields, axis=1).astype(np.int32)


def few_decode_splits(slots: list[int], seq_lens: list[int], kv_heads: int, window: int | None) -> list[int]:
    """Split as `decode_splits` does, one after another, for rows 0, 1 and so on: for a few of them this is faster."""
    cut = []
    for row, length in enumerate(seq_lens):
        oldest = 0 if window is None else max(length - window, 0)
        origin = oldest // TILE * TILE
        cut.append((row, length, oldest, origin, PIECE * -(-(length - origin) // (PIECE * MOST_PIECES))))
    most = max(PIECE, sum(length - origin for _, length, _, origin, _ in cut) * kv_heads // BUSY)
    cut.sort(key=lambda one: -(one[4] if one[1] - one[3] > most else one[1] - one[3]))
    numbers: list[int] = []
    for row, length, oldest, origin, size in cut:
        parts = -(-(length - origin) // size) if length - origin > most else 1
        for part in range(parts):
            begin = origin + part * size
            end = min(begin + size, length) if parts > 1 else length
            numbers += (row, slots[row], begin, end, oldest, size, parts, part)
    return numbers


def prefill_tiles(requests: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return [tiles, 2]: request and the first of its rows; those that see most keys first, for an even end."""
    tiles = -(-counts // QUERIES)
    starts = np.cumsum(tiles) - tiles
    first = (np.arange(tiles.sum()) - np.repeat(starts, tiles)) * QUERIES
    pairs = np.stack((np.repeat(requests, tiles), first), axis=1)
    return pairs[np.argsort(-first, kind="stable")].astype(np.int32)


def scratch_bytes(items: int, slots: int, heads: int, kv_heads: int, dim: int) -> int:
    """Return the bytes of decode_attention.DecodeScratch."""
    return 4 * (items * heads * (dim + 2) + slots * kv_heads)
