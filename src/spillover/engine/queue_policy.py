"""The orders in which waiting requests are admitted. A policy sees only requests and their cached prefix lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spillover.engine.requests.request import Request

# match(request) -> number of the request's tokens that the cache holds
Match = Callable[[Request], int]
QueuePolicy = Callable[[Sequence[Request], Match], list[Request]]

_Member = tuple[Request, tuple[object, ...]]  # a request, and its path in the tree: its salt and cached tokens

# Maximum number of waiting prompts, oldest first, that are matched at every step: more cost more time than they save.
MATCHED_QUEUE = 128


def fcfs(waiting: Sequence[Request], match: Match) -> list[Request]:
    return list(waiting)


def priority(waiting: Sequence[Request], match: Match) -> list[Request]:
    """Order by priority, lower numbers first; equals in order of arrival."""
    return sorted(waiting, key=lambda request: request.priority)


def longest_prefix_match(waiting: Sequence[Request], match: Match) -> list[Request]:
    """Order by length of the cached prefix, longest first, so that cached blocks are used before they are evicted."""
    head, tail = list(waiting[:MATCHED_QUEUE]), list(waiting[MATCHED_QUEUE:])
    return sorted(head, key=lambda request: -match(request)) + tail


def dfs_weight(waiting: Sequence[Request], match: Match) -> list[Request]:
    """Order depth first through the tree of cached prefixes, subtrees with more waiting requests first.

    Requests with the same prefix are then admitted one after the other, before those with another prefix.
    """
    head, tail = list(waiting[:MATCHED_QUEUE]), list(waiting[MATCHED_QUEUE:])
    paths: list[_Member] = [(r, (r.cache_salt, *r.token_ids[: match(r)])) for r in head]
    ordered: list[Request] = []

    def visit(members: list[_Member], depth: int) -> None:
        while members and all(len(path) > depth for _, path in members) and len({p[depth] for _, p in members}) == 1:
            depth += 1  # all members share this token
        ordered.extend(request for request, path in members if len(path) == depth)
        children: dict[object, list[_Member]] = {}
        for request, path in members:
            if len(path) > depth:
                children.setdefault(path[depth], []).append((request, path))
        for child in sorted(children.values(), key=len, reverse=True):
            visit(child, depth + 1)

    visit(paths, 0)
    return ordered + tail


PREFIXES_FIRST = ("lpm", "dfs-weight")  # policies by cached prefix: requests wait for prefixes that are being computed
POLICIES: dict[str, QueuePolicy] = {
    "fcfs": fcfs,
    "priority": priority,
    "lpm": longest_prefix_match,
    "dfs-weight": dfs_weight,
}
