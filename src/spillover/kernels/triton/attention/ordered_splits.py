"""How attention in the order of `softmax.py` is divided into programs.

Plain arithmetic: the host uses it for every step, the planner to size memory. Keys form pieces whose bounds are
positions of a sequence. A request with one new token has one program for the whole sequence or, where that would leave
the device idle, one program per piece; the result has the same bits. So does a request with a few new tokens (draft
tokens to verify, the end of a prompt), all of them in one program; one with more is cut into tiles of queries.
"""

from __future__ import annotations

import bisect
from functools import cache

import numpy as np
import numpy.typing as npt

TILE = 64  # keys per tile; every piece begins at a multiple of it
PIECE = 128  # keys of the smallest piece
BUSY = 264  # number of programs that keep a device busy; below that, sequences are split between programs
PROGRAMS = 132 * 16  # maximum number of programs per launch; of n programs each processes every n-th item
FIELDS = 10  # int32 numbers per item
TILE_QUERIES = 128  # queries per tile of queries
QUERIES = 16  # maximum number of new tokens of a request that is not cut into tiles of queries
LONG = 1024  # tokens from which a request with a few new tokens is split into pieces, if such requests are few
MOST_ITEMS = 256  # maximum number of items of requests with a few new tokens that are split into pieces
_LONGEST = 8192 << 10  # maximum number of positions of a sequence


def window_piece(window: int | None) -> int:
    """Return the positions per piece for rows that see a window of keys; 0 for rows that see all, whose pieces grow."""
    return 0 if window is None else max(PIECE, (1 << (window - 1).bit_length()) // 8)


@cache
def bounds(window: int | None) -> list[int]:
    """Return the positions at which pieces begin. Without a window: 8 pieces of 128 positions, then pieces of 256 up to
    8,192, then 16 pieces for every doubling of the position."""
    if window is not None:
        return list(range(0, _LONGEST + 1, window_piece(window)))
    made = [*range(0, 1024, PIECE), *range(1024, 8192, 256)]
    start = 8192
    while start < _LONGEST:
        made += range(start, 2 * start, start // 16)
        start *= 2
    return [*made, start]


@cache
def _bounds_array(window: int | None) -> npt.NDArray[np.int64]:
    return np.array(bounds(window))


@cache
def num_pieces(longest: int) -> int:
    """Return the maximum number of pieces of a sequence of `longest` tokens, with or without a window."""
    return bisect.bisect_left(bounds(None), longest)


def max_splits(requests: int, longest: int, kv_heads: int) -> int:
    """Return the maximum number of items of n sequences of up to `longest` tokens; only a few can be split at once."""
    return requests + min(requests, BUSY // kv_heads) * (num_pieces(longest) - 1)


def max_items(requests: int, longest: int, kv_heads: int) -> int:
    """Return the maximum number of items of n sequences, at least enough for some requests with QUERIES rows."""
    return max(max_splits(requests, longest, kv_heads), QUERIES * min(MOST_ITEMS, 2 * num_pieces(longest)))


def scratch_bytes(items: int, slots: int, heads: int, kv_heads: int, dim: int) -> int:
    """Return the size of kernels.batch.DecodeScratch in bytes."""
    return 4 * (items * heads * (dim + 2) + slots * kv_heads)


def decode_splits(
    rows: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    seq_lens: npt.NDArray[np.int64],
    kv_heads: int,
    window: int | None,
) -> npt.NDArray[np.int32]:
    """Return [items, FIELDS] for requests with one new token each: the row of the query, the row of the block tables,
    the item's first key, the one past its last, the oldest visible key (0 or less: all), the number of the request's
    items, the index of this one, the index of the sums of the request's first piece, its number of new tokens, and its
    length. Items with most keys come first, so that programs complete at about the same time."""
    origin = _origin(seq_lens, window)
    span = seq_lens - origin
    split = span > max(PIECE, span.sum() * kv_heads // BUSY)
    return _items(rows, slots, seq_lens, np.ones_like(rows), origin, split, window)


def prefill_tiles(requests: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return [tiles, 2]: request and its first row in the tile; tiles that see most keys first, to balance the load."""
    tiles = -(-counts // TILE_QUERIES)
    starts = np.cumsum(tiles) - tiles
    first = (np.arange(tiles.sum()) - np.repeat(starts, tiles)) * TILE_QUERIES
    pairs = np.stack((np.repeat(requests, tiles), first), axis=1)
    return pairs[np.argsort(-first, kind="stable")].astype(np.int32)


def short_chunk_splits(
    rows: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    seq_lens: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    window: int | None,
    whole: bool = False,
) -> npt.NDArray[np.int32]:
    """Return [items, FIELDS] for requests with a few new tokens each: one item per piece, or with `whole` one per
    request; `rows`: the first row of each request."""
    return _items(rows, slots, seq_lens, counts, _origin(seq_lens - counts + 1, window),
                  np.full(len(rows), not whole), window)


def short_chunks(counts: npt.NDArray[np.int64], seq_lens: npt.NDArray[np.int64], kv_heads: int, most_items: int,
                 most_pieces: int) -> tuple[npt.NDArray[np.bool_], bool]:
    """Choose the requests whose few new tokens are better processed as items than as a tile of queries. Also return
    whether each is one item, which it is if that keeps the device busy. `most_pieces`: upper bound of their pieces."""
    few = (counts > 1) & (counts <= QUERIES)
    number = int(few.sum())
    if number * kv_heads >= BUSY // 2 and number <= most_items:
        return few, True
    chosen = few & (seq_lens >= LONG)
    pieces = np.where(chosen, np.searchsorted(_bounds_array(None), seq_lens, "left"), 0)
    return chosen & (pieces.cumsum() <= min(most_items, most_pieces)), False


def _origin(seq_lens: npt.NDArray[np.int64], window: int | None) -> npt.NDArray[np.int64]:
    return np.zeros_like(seq_lens) if window is None else np.maximum(seq_lens - window, 0) // TILE * TILE


def _items(
    rows: npt.NDArray[np.int64], slots: npt.NDArray[np.int64], seq_lens: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64], origin: npt.NDArray[np.int64], split: npt.NDArray[np.bool_], window: int | None,
) -> npt.NDArray[np.int32]:
    oldest = np.zeros_like(seq_lens) if window is None else seq_lens - counts + 1 - window
    starts = _bounds_array(window)
    first_piece = np.searchsorted(starts, origin, "right") - 1
    parts = np.where(split, np.searchsorted(starts, seq_lens, "left") - first_piece, 1)
    request = np.repeat(np.arange(len(parts)), parts)
    part = np.arange(len(request)) - (np.cumsum(parts) - parts)[request]
    places = np.where(split, parts, 0).cumsum() - np.where(split, parts, 0)
    piece = first_piece[request] + part
    begin = np.where(split[request], np.maximum(starts[piece], origin[request]), origin[request])
    end = np.where(split[request], np.minimum(starts[piece + 1], seq_lens[request]), seq_lens[request])
    fields = (rows[request], slots[request], begin, end, oldest[request], parts[request], part, places[request],
              counts[request], seq_lens[request])
    items = np.stack(fields, axis=1).astype(np.int32)
    return items[np.argsort(begin - end, kind="stable")]


def few_decode_splits(slots: list[int], seq_lens: list[int], kv_heads: int, window: int | None) -> list[int]:
    """Return the items of `decode_splits` for rows 0, 1 and so on, in plain Python: faster for a few rows."""
    spans = []
    for length in seq_lens:
        oldest = 0 if window is None else length - window
        spans.append((oldest, max(oldest, 0) // TILE * TILE, length))
    most = max(PIECE, sum(length - origin for _, origin, length in spans) * kv_heads // BUSY)
    items, place = [], 0
    for row, (oldest, origin, length) in enumerate(spans):
        if length - origin <= most:
            items.append((row, slots[row], origin, length, oldest, 1, 0, place, 1, length))
            continue
        starts = bounds(window)
        cuts = [origin, *starts[bisect.bisect_right(starts, origin):bisect.bisect_left(starts, length)], length]
        parts = len(cuts) - 1
        items += [(row, slots[row], cuts[part], cuts[part + 1], oldest, parts, part, place, 1, length)
                  for part in range(parts)]
        place += parts
    items.sort(key=lambda item: item[2] - item[3])
    return [number for item in items for number in item]
