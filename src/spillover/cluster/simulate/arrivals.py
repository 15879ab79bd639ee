"""Requests to simulate, with keys for the blocks of their prompts: blocks with the same tokens after the same prefix
have the same key."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float  # arrival time in seconds
    tokens: int  # number of prompt tokens
    output_tokens: int  # number of answer tokens, at least 1
    keys: Sequence[int] = ()  # keys of the prompt's full blocks; empty if none is ever found again


class BlockNames:
    """Assigns keys to blocks by their contents and the block before, exactly: no digest, so no collision."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._count = 0
        self._runs: dict[tuple[int, Hashable], list[int]] = {}  # (block before, part) -> the part's blocks, in order
        self._mixed: dict[tuple[int, tuple[tuple[Hashable, int, int], ...]], int] = {}

    def keys(self, parts: Iterable[tuple[Hashable, int]]) -> tuple[int, ...]:
        """Return the keys of a prompt's full blocks. `parts` has names and lengths of its pieces; of two pieces with
        the same name the shorter is a prefix of the longer."""
        size, names = self.block_size, list[int]()
        spans: list[tuple[Hashable, int, int]] = []
        left = size  # tokens that still fit into the open block
        for part, length in parts:
            at = 0
            if left == size and length >= size:
                run = self._runs.setdefault((names[-1] if names else 0, part), [])
                while len(run) < length // size:
                    run.append(self._next())
                names.extend(run[:length // size])
                at = length // size * size
            while at < length:
                take = min(left, length - at)
                spans.append((part, at, at + take))
                at, left = at + take, left - take
                if not left:
                    block = (names[-1] if names else 0, tuple(spans))
                    if block not in self._mixed:
                        self._mixed[block] = self._next()
                    names.append(self._mixed[block])
                    spans, left = [], size
        return tuple(names)

    def _next(self) -> int:
        self._count += 1
        return self._count


def reusable(arrivals: Iterable[Arrival], block_size: int) -> float:
    """Return the share of prompt tokens that one unlimited cache finds in the order of arrival: the most that any
    router could have found. The last token of a prompt is always computed."""
    seen: set[int] = set()
    found = total = 0
    for arrival in arrivals:
        known = 0
        for key in arrival.keys:
            if key not in seen:
                break
            known += 1
        seen.update(arrival.keys[known:])
        found += min(known, (arrival.tokens - 1) // block_size) * block_size
        total += arrival.tokens
    return found / total if total else 0.0
