"""The interface of drafters, which propose tokens. Wrong drafts cost only time and never change the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from spillover.engine.requests.request import Request


class Alternative(NamedTuple):
    """What a drafting model would have proposed instead of a token."""

    token: int  # the most likely token other than the drafted one
    gap: float  # log probability of the drafted token minus that of this one; negative if this one is more likely


class Draft(NamedTuple):
    """Proposed next tokens, and for each the drafter's confidence that it is right if all tokens before it are."""

    tokens: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()  # one value per token, above 0 and at most 1
    alternatives: tuple[Alternative, ...] = ()  # one per token; () unless the speculator wants them for branches


NOTHING = Draft()


class Drafter(Protocol):
    """Proposes drafts for requests whose newest token is known.

    It may use a request's tokens and data kept from requests with the same `cache_salt`, never of a different salt.
    """

    @property
    def sequential(self) -> bool:
        """Return whether each draft token takes a pass of a model: then draft lengths are chosen before drafting, and
        no drafts are made only for statistics."""
        ...

    @property
    def expected(self) -> tuple[float, ...] | None:
        """Return the share of drafts accepted up to each position if it is known beforehand, else None."""
        ...

    def propose(self, requests: Sequence[tuple[Request, int]]) -> list[Draft]:
        """Return a draft of at most n tokens for each (request, n)."""
        ...

    def end(self, request: Request) -> None:
        """Drop the state of a finished request; its tokens may be kept, to draft for other requests of its salt."""
        ...


@runtime_checkable
class PrefixCachingDrafter(Protocol):
    """A drafter that keeps the KV of prefixes."""

    def reset_prefix_cache(self) -> None: ...
