"""What proposes tokens. A drafter may be wrong as often as it likes: what it costs is time, never the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from spillover.engine.requests.request import Request


class Draft(NamedTuple):
    """Tokens that may come next, and for each how sure the drafter is that it does if those before it did."""

    tokens: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()  # as many, above 0 and at most 1


NOTHING = Draft()


class Drafter(Protocol):
    """Proposes for requests whose newest token is known.

    It may read a request's own tokens, and what it kept of others with the same `cache_salt`; never of another salt.
    """

    @property
    def sequential(self) -> bool:
        """Return whether each token of a draft takes a pass of a model, so that its length is to be chosen before, and
        no draft is made only to be compared."""
        ...

    @property
    def expected(self) -> tuple[float, ...] | None:
        """Return the share of drafts accepted up to each position, where that is known beforehand."""
        ...

    def propose(self, asked: Sequence[tuple[Request, int]]) -> list[Draft]:
        """Return a draft of at most n tokens for each (request, n)."""
        ...

    def end(self, request: Request) -> None:
        """Forget a request that has ended; its tokens may be kept, to draft for other requests of its salt."""
        ...


@runtime_checkable
class KeepsPrefixes(Protocol):
    """A drafter that keeps the KV of prefixes."""

    def reset_prefix_cache(self) -> None: ...
