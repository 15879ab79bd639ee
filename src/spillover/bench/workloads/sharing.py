"""An estimate of how much of a workload a prefix cache could serve, without drawing a token.

A prompt is a sequence of parts; the same key stands for the same tokens. `simulate` runs the requests in order against
a cache that never evicts, so its result is the most that any cache could reach: requests in flight at the same time
share less. A server that reports more hits than this was not cold.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

BLOCK_SIZE = 16  # tokens per block; caches keep only whole blocks


@dataclass(frozen=True, slots=True)
class Part:
    """A run of tokens. Of two parts with the same key, the shorter is a prefix of the longer."""

    key: Hashable
    length: int


@dataclass(frozen=True)
class Sharing:
    prompt_tokens: int
    shared_tokens: int  # prompt tokens in whole blocks that an earlier request has left in the cache
    working_set_tokens: int  # distinct tokens of KV without any eviction, answers included

    @property
    def share(self) -> float:
        return self.shared_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def simulate(requests: Iterable[tuple[Sequence[Part], Part]], block_size: int = BLOCK_SIZE) -> Sharing:
    """Count the hits of an infinite prefix cache. `requests`: whole prompts and answers, in order of arrival."""
    tree = PrefixTree()
    total = shared = distinct = 0
    for prompt, answer in requests:
        length = sum(part.length for part in prompt)
        # The last token of an answer is never fed back, so it has no KV.
        kept = Part(answer.key, max(0, answer.length - 1))
        found = tree.add([*prompt, kept])
        total += length
        # One token of a prompt is always computed.
        shared += min(found, length - 1) // block_size * block_size
        distinct += length + kept.length - found
    return Sharing(total, shared, distinct)


class PrefixTree:
    """All prompts so far, as a tree of their parts."""

    def __init__(self) -> None:
        self._root = _Node()

    def add(self, parts: Iterable[Part]) -> int:
        """Add a prompt and return the number of its tokens, from the start, that were already in the tree."""
        node, found = self._root, 0
        known = True
        for part in parts:
            child = node.children.get(part)
            if known and child is not None:
                found += part.length
            elif known:
                found += min(part.length, node.longest.get(part.key, 0))
                known = False
            if child is None:
                child = node.children[part] = _Node()
                node.longest[part.key] = max(part.length, node.longest.get(part.key, 0))
            node = child
        return found


class _Node:
    __slots__ = ("children", "longest")

    def __init__(self) -> None:
        self.children: dict[Part, _Node] = {}
        self.longest: dict[Hashable, int] = {}  # length of the longest child by key


def token_parts(ids: Sequence[int], block_size: int = BLOCK_SIZE) -> tuple[Part, ...]:
    """Return the parts of a prompt with known tokens: each block is its own key."""
    return tuple(Part(tuple(ids[start : start + block_size]), min(block_size, len(ids) - start))
                 for start in range(0, len(ids), block_size))
