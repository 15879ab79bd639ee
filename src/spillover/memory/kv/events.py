"""What happens to stored blocks, as whoever holds them tells it; by default to nobody, at no cost."""

from typing import Protocol, runtime_checkable


class BlockEvents(Protocol):
    """A listener to the tiers below the device, called on the engine's thread. Keys are the tiers' names of blocks."""

    def stored(self, tier: str, key: bytes) -> None: ...  # it can be found there from now on

    def removed(self, tier: str, key: bytes) -> None: ...  # it no longer can


class NoBlockEvents:
    """The listener where there is none."""

    def stored(self, tier: str, key: bytes) -> None:
        """Do nothing."""

    def removed(self, tier: str, key: bytes) -> None:
        """Do nothing."""


NO_BLOCK_EVENTS = NoBlockEvents()


@runtime_checkable
class TellingTier(Protocol):
    """A tier that always knows what it holds. A remote store does not: its server forgets without a word."""

    def tell(self, events: BlockEvents) -> None:
        """Tell of every block that is here now, and from now on of each that comes or goes."""
