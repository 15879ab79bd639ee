"""Events of stored blocks, which the tiers report to a listener; by default there is none, at no cost."""

from typing import Protocol, runtime_checkable


class BlockEvents(Protocol):
    """A listener to the tiers below the device, called on the engine's thread. A key names a block in the tiers."""

    def stored(self, tier: str, key: bytes) -> None: ...  # the block can be found in the tier from now on

    def removed(self, tier: str, key: bytes) -> None: ...  # the block can no longer be found in the tier


class NoBlockEvents:
    """The default listener, which ignores all events."""

    def stored(self, tier: str, key: bytes) -> None:
        """Do nothing."""

    def removed(self, tier: str, key: bytes) -> None:
        """Do nothing."""


NO_BLOCK_EVENTS = NoBlockEvents()


@runtime_checkable
class EventSourceTier(Protocol):
    """A tier that always knows what it holds. A remote store does not: its server drops blocks without notice."""

    def publish_to(self, events: BlockEvents) -> None:
        """Report every block that the tier holds now to `events`, and every later change."""
