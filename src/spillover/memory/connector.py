"""The contract between the scheduler and the tiers that keep KV below the device: lookup, begin, progress, end, poll.

A waiting request has a lookup until `forget`; a running request may have loads from `begin` until `end`. Every method
is called on the engine's thread and returns at once. A failure in a lower tier never fails a request: blocks that are
not loaded are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from spillover.memory.kv.events import BlockEvents
from spillover.memory.spill.report import TierReport
from spillover.memory.tiers.base import Tier


@dataclass(frozen=True)
class Progress:
    """How far the loads of one sequence have come."""

    num_computed: int  # number of tokens with KV, including loaded ones that directly follow the computed ones
    sources: Mapping[str, int] = field(default_factory=dict)  # number of loaded tokens that this call added, by tier
    loading: bool = False  # whether loads are still in flight
    ended: bool = True  # whether no token after num_computed will be loaded


class KVConnector(Protocol):
    """The scheduler's interface to the tiers. `seq` is a request's id; a running request holds blocks of the cache."""

    # Waiting requests

    def lookup(self, seq: str, tokens: Sequence[int], salt: str | None, coming: bool = False) -> bool:
        """Start one lookup of the prompt in the tiers; return whether all have answered or timed out.
        `coming`: another engine is storing the prompt's blocks, so missing blocks are looked up again, for as long as
        computing them would take."""

    def forget(self, seq: str) -> None:
        """End the lookup, because the request was admitted or no longer waits."""

    # Running requests

    def begin(self, seq: str, tokens: Sequence[int], salt: str | None) -> int | None:
        """Start loading the blocks that follow a newly admitted sequence's cached prefix, where loading is worthwhile.
        Return the number of tokens up to which it may be computed during the load: len(tokens) if nothing is loaded;
        None, with nothing changed, if there is no room yet."""

    def progress(self, seq: str, num_computed: int) -> Progress | None:
        """Add loaded blocks to what is computed; None if the loads cannot complete and the sequence must start over."""

    def limit(self, seq: str, num_computed: int, num_tokens: int) -> int:
        """Return the number of tokens up to which to compute the sequence: the next ones are loaded or may be soon."""

    def offload(self, seq: str, num_blocks: int) -> bool:
        """Start moving the sequence's oldest blocks to host memory, because the device has no room for more.

        The sequence must be the only one and have no step in flight. True while blocks are being moved, which will free
        room; False if none can be moved. The prefix tree is emptied: all its blocks in use belong to this sequence.
        """

    def host_blocks(self, seq: str) -> tuple[int, ...]:
        """Return the host tier's slots of the sequence's offloaded leading blocks, whose table entries are 0."""

    def end(self, seq: str) -> None:
        """Drop the sequence's loads and offloaded blocks; called just before the KV cache releases its blocks."""

    # Between steps

    def observe(self, prefill_tokens: int, num_tokens: int, seconds: float) -> None:
        """Update the estimate of compute time from a completed step."""

    def reserve(self, num_blocks: int) -> None:
        """Keep num_blocks free for decoding requests: other requests and copies do not use them."""

    def poll_loads(self) -> None:
        """Process completed loads only, which requests wait for: a small part of poll()."""

    def poll(self, hurried: bool = False) -> None:
        """Process completed copies and start new ones. `hurried`: everything but loads may wait for a later step."""

    def wait(self, seconds: float) -> None:
        """Sleep until a copy may have completed, for at most this many seconds."""

    @property
    def busy(self) -> bool:
        """Return whether copies are in progress that further calls of poll() would advance."""

    @property
    def has_urgent_spills(self) -> bool:
        """Return whether blocks that spill eagerly, as other engines may wait for them, are not all copied yet."""

    # Stored blocks

    @property
    def tiers(self) -> Sequence[Tier]:
        """Return the tiers below host memory, whose contents may change without action of the engine."""

    def publish_to(self, events: BlockEvents) -> None:
        """Report every block that the tiers hold now to `events`, and every later change."""

    def reports(self) -> list[TierReport]: ...

    def clear(self, external: bool = False) -> None:
        """Forget the blocks in host memory; `external`: also those in all tiers below it."""

    def close(self, deadline: float) -> None:
        """End all copies; before that, write blocks that only device or host memory has to the tiers below, in time."""

    def check(self) -> None:
        """Assert the invariants that hold between any two steps."""


class NullConnector:
    """The connector of an engine without lower tiers: it finds, loads and stores nothing."""

    busy = False
    has_urgent_spills = False
    tiers = ()

    def lookup(self, seq: str, tokens: Sequence[int], salt: str | None, coming: bool = False) -> bool:
        return True

    def begin(self, seq: str, tokens: Sequence[int], salt: str | None) -> int | None:
        return len(tokens)

    def progress(self, seq: str, num_computed: int) -> Progress | None:
        return Progress(num_computed)

    def limit(self, seq: str, num_computed: int, num_tokens: int) -> int:
        return num_tokens

    def offload(self, seq: str, num_blocks: int) -> bool:
        return False

    def host_blocks(self, seq: str) -> tuple[int, ...]:
        return ()

    def publish_to(self, events: BlockEvents) -> None:
        """Report nothing: no tier holds blocks."""

    def reports(self) -> list[TierReport]:
        return []

    def forget(self, seq: str) -> None: ...

    def end(self, seq: str) -> None: ...

    def observe(self, prefill_tokens: int, num_tokens: int, seconds: float) -> None: ...

    def reserve(self, num_blocks: int) -> None: ...

    def poll_loads(self) -> None: ...

    def poll(self, hurried: bool = False) -> None: ...

    def wait(self, seconds: float) -> None: ...

    def clear(self, external: bool = False) -> None: ...

    def close(self, deadline: float) -> None: ...

    def check(self) -> None: ...
